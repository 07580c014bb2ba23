"""What a user asks of each command and function: declared once, with types, bounds and defaults.

From these fields come the keyword arguments of `autotune.plan` and the like, the options of the
command line, their `--help`, and docs/reference.md.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from autotune.errors import InvalidInput
from autotune.plan.amounts import MemoryAmount
from autotune.plan.base import Request
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import DataFields, Job, JobFields, ModelRef, as_job_data
from autotune.plan.plan import TrainingPlan
from autotune.plan.prediction import Overheads
from autotune.plan.workload import ADAMW, NamedOptimizer, WorkloadRequest

Pairs = tuple[tuple[str, str], ...]


def _as_pairs(values: Any) -> Pairs:
    items = values.items() if isinstance(values, Mapping) else values
    return tuple((name, str(value)) for name, value in items)


KnobValues = Annotated[Pairs | Mapping[str, str | int], BeforeValidator(_as_pairs)]
"""A value for each of some knobs, e.g. `{"quantization": "none"}`; kept as pairs."""


class HardwareRequest(Request):
    """What to plan for instead of this machine."""

    hardware: str | HardwareProfile | None = None
    """Another machine: a GPU of the catalog, e.g. 4090 (see probe --list), or a saved probe."""
    host_memory: MemoryAmount | None = None
    """Memory of that GPU's host; 64GiB by default."""
    assume: Annotated[tuple[str, ...], BeforeValidator(tuple)] = ()
    """A package to assume on that GPU: flash-attn, flash-attn-3, flash-attn-4 or xformers. Their
    speed is then taken from publications."""
    price_per_hour: float | None = Field(default=None, ge=0, le=1e6)
    """Price of an hour of one GPU, for the cost of the job, in any currency."""

    def require_named(self) -> None:
        """Raise InvalidInput if this machine is described, which needs no description."""
        for name, what in (("host_memory", "host memory"), ("assume", "software")):
            if self.hardware is None and getattr(self, name):
                raise InvalidInput(
                    f"this machine's {what} is known",
                    hint="to describe another machine, add --hardware",
                )


class PlanRequest(JobFields, WorkloadRequest, HardwareRequest):
    """What a user asks of a search.

    Example:
        >>> autotune.plan("qwen-image", data="photos", rank=32, max_trials=4, path="plan.yaml")
    """

    path: str | Path | None = None
    """File to write the plan to. That it can be written is checked before the search."""
    earlier: TrainingPlan | str | Path | None = None
    """Make this plan again; other options replace what it was made for."""
    pins: KnobValues = ()
    """Choose only this value of a knob."""
    exclusions: KnobValues = ()
    """Never choose this value of a knob."""
    for_trainer: str | None = None
    """Choose only what this trainer can express and fit, as `export-config` names it."""
    num_gpus: int = Field(default=1, ge=1)
    """GPUs that train together, one process each; tested on CPUs only."""
    max_memory: MemoryAmount | None = None
    """The most memory of the GPU, or of the process on a CPU, that a run may take in any phase."""
    reserve_memory: MemoryAmount | None = None
    """Memory to leave to the display and other programs, in place of the usual reserve."""
    cap_memory: MemoryAmount | None = None
    """Rehearse a device with only so much memory, e.g. 12GiB."""
    use_records: bool = True
    """Use what machines measured before."""
    max_trials: int = Field(default=8, ge=1)
    """The most trials to run."""
    search_seconds: float | None = Field(default=None, ge=1)
    """The most seconds of trials; by default 5% of the run, at least 60."""
    fresh: bool = False
    """Forget what an interrupted search has measured."""
    study: str | None = None
    """Keep the trials and their plan under this name."""
    storage: str | None = Field(default=None, repr=False)
    """Share the study: postgresql+psycopg://user:password@host/database."""
    ref: ModelRef | None = None
    """The model with its parts, if it is resolved."""
    overheads: Overheads | None = None
    """Overheads of the program that will train; None for autotune's own executor."""
    interrupted: Literal["ignored", "resumed", "forgotten"] = "ignored"
    """What becomes of an interrupted search of the same without a name. `ignored` keeps trials in
    memory."""

    @property
    def model_ref(self) -> ModelRef:
        """The model with its parts. Raises InvalidInput if none is named."""
        if self.ref is not None:
            return self.ref
        if self.model is None:
            raise InvalidInput(
                "no model is named", hint="name a model, or an earlier plan: earlier=, --from"
            )
        return ModelRef(
            name=self.model,
            revision=self.revision,
            base=self.base,
            vae=self.vae,
            text_encoders=self.text_encoders,
            expert=self.expert,
        )

    @property
    def is_local(self) -> bool:
        """Whether the hardware asked about is this machine's: only then can trials run."""
        return self.hardware is None

    @property
    def given_job(self) -> dict[str, Any]:
        """The fields of the job that were given."""
        return {name: value for name, value in self.given.items() if name in Job.model_fields}

    @property
    def pin_pairs(self) -> Pairs:
        """(knob, value) pairs: only this value may be chosen."""
        return _as_pairs(self.pins)

    @property
    def exclusion_pairs(self) -> Pairs:
        """(knob, value) pairs: this value may not be chosen."""
        return _as_pairs(self.exclusions)

    @classmethod
    def of_plan(cls, plan: TrainingPlan) -> Self:
        """Return the request that `plan` answered."""
        frozen, job = plan.frozen, plan.job
        work = WorkloadRequest.again(frozen.workload, has_data=job.data is not None)
        return cls.model_validate(
            {
                **dict(job),
                **work.given,
                "num_gpus": frozen.hardware.num_processes,
                "price_per_hour": frozen.expected.price_per_hour,
                "pins": frozen.pins,
                "exclusions": frozen.exclusions,
                "overheads": frozen.overheads,
            }
        )

    def over(self, plan: TrainingPlan) -> Self:
        """Return the request that `plan` answered, with what is given here in its place."""
        before, now = type(self).of_plan(plan).given, self.given
        if "rank" in now:
            before.pop("lora_alpha")  # another rank brings its own
        if self.model is not None:
            for name in ("base", "vae", "text_encoders", "revision", "expert"):
                before.pop(name)
        if "base" in now:
            before.pop("revision", None)  # a commit of another repository
        if "num_steps" in now:
            before.pop("num_train_epochs")
        if "checkpointing_steps" in now:
            before.pop("checkpointing_epochs")
        if "optimizer" in now or "optimizer_options" in now:
            old = plan.frozen.workload.optimizer
            name = self.optimizer_choice.name if "optimizer" in now else old.name
            options = dict(old.options) if name == old.name else {}
            before["optimizer"] = name
            now["optimizer_options"] = {**options, **dict(self.optimizer_choice.options)}
            now["optimizer"] = name
            if name != old.name:
                before.pop("learning_rate")  # it was for the other
        return type(self).model_validate({"on_event": self.on_event, **before, **now})


class EstimateRequest(WorkloadRequest, HardwareRequest, Candidate):
    """What a user asks of an estimate: a workload, hardware, and one candidate.

    Example:
        >>> autotune.estimate("flux1-dev", hardware="4090", quantization="torchao-int8")
    """

    model: str = ""
    """A known model's name, a folder in the diffusers layout, or a hub id."""
    num_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps of the job."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Images per forward pass."""
    checkpointed_blocks: int | Literal["all", "none"] = "all"  # type: ignore[assignment]
    """Blocks that recompute their activations: none, all, or how many."""
    optimizer: NamedOptimizer = ADAMW  # type: ignore[assignment]
    """The optimizer, as for plan."""


class CompareRequest(JobFields, WorkloadRequest):
    """What a user asks of a comparison of GPUs.

    Example:
        >>> autotune.compare("flux1-dev", prices={"4090": 0.4, "h100-sxm": 2.5}, num_steps=1000)
    """

    hardware: str | tuple[str, ...] = "all"
    """GPUs of the catalog, separated by commas, or all."""
    prices: Mapping[str, float] | str | Path | None = None
    """YAML: what an hour of each GPU costs (docs/prices.yaml)."""
    max_cost: float | None = Field(default=None, ge=0)
    """Leave out what costs more."""
    max_hours: float | None = Field(default=None, ge=0)
    """Leave out what takes longer."""
    order: Literal["cost", "hours", "name"] | None = None
    """What comes first; by default the cheapest if there are prices, else the fastest."""
    download_rate: MemoryAmount = 100_000_000
    """Bytes a second at which the model's files arrive; a folder needs no download."""
    pins: KnobValues = ()
    exclusions: KnobValues = ()
    for_trainer: str | None = None


class TrainRequest(JobFields, Request):
    """What a user asks of a run: a plan, and fields of its job to replace.

    Example:
        >>> autotune.train("plan.yaml", output="first-run", learning_rate=5e-5)
    """

    plan: TrainingPlan | str | Path | None = None
    """A plan made by `autotune plan`; without one, --model is planned first."""
    optimizer: str | None = None
    """The plan's package:Class, which is loaded only if you name it."""
    resume: bool = False
    """Continue from the newest checkpoint, if there is one."""
    trace: bool = False
    """Write a trace of a few steps (torch.profiler) to trace.json."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Serve Prometheus metrics at this port of localhost."""
    push_to_hub: str | None = None
    """Upload adapter, samples and a model card, privately, at the end."""

    @property
    def given_job(self) -> dict[str, Any]:
        """The fields of the job that were given."""
        return {name: value for name, value in self.given.items() if name in Job.model_fields}


class CheckDataRequest(DataFields, Request):
    """What a user asks of a look at training data.

    Example:
        >>> autotune.check_data("photos", resolution_px=512).problems
    """

    data: Annotated[str | tuple[str, ...], BeforeValidator(as_job_data)] = ()
    """Folders of images with same-stem .txt captions, or a data.yaml."""
    model: str = "qwen-image"
    """Family whose sizes count."""
    resolution_px: int | None = Field(default=None, ge=1)
    """Side of a square image, in pixels."""
    max_upscaling: float = Field(default=1.5, ge=1)
    """Count images enlarged by more, per side."""
    max_crop: float = Field(default=0.25, ge=0, le=1)
    """Name images that lose more of their area."""
