"""What the same job would take on several GPUs, from the plan that is predicted for each: pure."""

from collections.abc import Sequence
from typing import Literal

from pydantic import computed_field

from autotune.machine.catalog import CatalogGpu
from autotune.models.family import Parts
from autotune.plan.base import Frozen
from autotune.plan.candidate import Candidate
from autotune.plan.plan import TrainingPlan
from autotune.search.study import SearchLimits

BYTES_PER_PARAMETER = 2
"""Bytes of a published weight, in bf16."""
ComparisonOrder = Literal["cost", "hours", "name"]


class ComparedGpu(Frozen):
    """One GPU in a comparison. Seconds, hours and cost are None if nothing fits.

    Example:
        >>> [gpu.total_seconds for gpu in autotune.compare("flux1-dev", hardware=["4090", "l40s"]).gpus]
    """

    gpu: str
    """Its name in the catalog."""
    memory_gb: float
    """Nominal memory of the card."""
    misfit: str | None = None
    """Why nothing fits."""
    settings: Candidate | None = None
    num_steps: int = 0
    """Optimizer steps of the job."""
    step_seconds: float | None = None
    """Time of an optimizer step."""
    image_seconds: float | None = None
    """Time of a step for each image (or clip) in it."""
    time_uncertainty: float | None = None
    """Standard error of `step_seconds`, as a share of it."""
    run_memory_bytes: int | None = None
    """Run memory: of the phase that needs most."""
    download_seconds: float | None = None
    """Until the model's files are there."""
    search_seconds: float | None = None
    """What the search's trials may take at most."""
    other_seconds: float | None = None
    """Time of the run besides its steps: loading, caching, compiling, previews and checkpoints."""
    price_per_hour: float | None = None
    """None if the user named no price of this GPU."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total_seconds(self) -> float | None:
        """Time from an empty machine to the finished adapter."""
        return self._total(0.0)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def hours_range(self) -> tuple[float, float] | None:
        """Hours if steps are shorter, and if they are longer, by their standard error."""
        share = self.time_uncertainty or 0.0
        low, high = self._total(-share), self._total(share)
        return None if low is None or high is None else (low / 3600, high / 3600)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cost(self) -> float | None:
        """Cost of all that, in the currency of the price."""
        total = self.total_seconds
        return (
            None
            if total is None or self.price_per_hour is None
            else self.price_per_hour * total / 3600
        )

    def _total(self, slower: float) -> float | None:
        if self.step_seconds is None:
            return None
        besides = (
            (self.download_seconds or 0.0)
            + (self.search_seconds or 0.0)
            + (self.other_seconds or 0.0)
        )
        return besides + self.num_steps * self.step_seconds * (1 + slower)


class Comparison(Frozen):
    """One job on several GPUs.

    Example:
        >>> found = autotune.compare("flux1-dev", prices={"4090": 0.4, "h100-sxm": 2.5})
        >>> found.gpus[0].gpu, found.num_left_out
    """

    model: str
    gpus: tuple[ComparedGpu, ...]
    """Within the limits that were asked, in order; then those that nothing fits."""
    num_left_out: int = 0
    """GPUs that it fits, but beyond the limits."""
    currency: str = ""
    priced: str = ""
    """When the prices were looked up, as their file says."""


def compared_gpu(
    gpu: CatalogGpu, plan: TrainingPlan, *, download_seconds: float, price_per_hour: float | None
) -> ComparedGpu:
    """A GPU that the job fits, from the plan that was predicted for it."""
    expected, workload = plan.frozen.expected, plan.frozen.workload
    limits = SearchLimits(max_trials=1, num_steps=plan.job.num_steps)
    return ComparedGpu(
        gpu=gpu.id,
        memory_gb=gpu.memory_nominal_gb,
        settings=plan.frozen.settings,
        num_steps=plan.job.num_steps,
        step_seconds=expected.step_seconds,
        image_seconds=expected.step_seconds / workload.effective_batch_size,
        time_uncertainty=expected.time_uncertainty,
        run_memory_bytes=expected.run_memory_bytes,
        download_seconds=download_seconds,
        search_seconds=limits.allowed_seconds(expected.step_seconds),
        other_seconds=expected.other_seconds,
        price_per_hour=price_per_hour,
    )


def download_bytes(num_parameters: int, parts: Parts) -> int:
    """Bytes of a published model's files: transformer and text encoders in bf16. The autoencoder
    is small beside."""
    return BYTES_PER_PARAMETER * (num_parameters + sum(parts.text_encoder_parameters))


def select_gpus(
    compared: Sequence[ComparedGpu],
    *,
    max_cost: float | None = None,
    max_hours: float | None = None,
    order: ComparisonOrder | None = None,
) -> tuple[ComparedGpu, ...]:
    """Those that a job fits within the limits, in order, then those that nothing fits, by name.

    Args:
        compared: GPUs.
        max_cost: leaves out GPUs that cost more, and those without a price.
        max_hours: leaves out GPUs that take longer.
        order: what comes first; by default the cheapest, those without a price last, if any has
            one, else the fastest.
    """
    order = order or ("cost" if any(one.cost is not None for one in compared) else "hours")

    def rank(one: ComparedGpu) -> tuple[float | str, ...]:
        cost = float("inf") if one.cost is None else one.cost
        return {
            "cost": (cost, one.total_seconds or 0.0),
            "hours": (one.total_seconds or 0.0,),
            "name": (),
        }[order]

    def is_within(one: ComparedGpu) -> bool:
        if max_cost is not None and (one.cost is None or one.cost > max_cost):
            return False
        return max_hours is None or (one.total_seconds or 0.0) <= 3600 * max_hours

    fitting = [one for one in compared if one.misfit is None and is_within(one)]
    others = [one for one in compared if one.misfit is not None]
    return (
        *sorted(fitting, key=lambda one: (*rank(one), one.gpu)),
        *sorted(others, key=lambda one: one.gpu),
    )
