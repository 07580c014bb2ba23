"""One job compared on several GPUs; and published models on those of the catalog, predicted ahead
by `benchmarks/predict_catalog.py`, which also say which GPUs fit a model that has none here."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal

from pydantic import computed_field

from autotune.errors import NothingFits
from autotune.machine.catalog import CatalogGpu, load_catalog
from autotune.models.facts import USUAL_IMAGES, Defaults, Parts, PublishedModel
from autotune.models.family import Family
from autotune.models.registry import FAMILIES
from autotune.models.resolve import ResolvedModel, read_parts
from autotune.plan.base import Frozen
from autotune.plan.candidate import Candidate
from autotune.plan.plan import TrainingPlan
from autotune.plan.prediction import TIME_SIGMAS
from autotune.plan.words import TITLES, setting_text
from autotune.system.files import shipped_path

BYTES_PER_PARAMETER = 2  # bytes of a published weight, in bf16
DOWNLOAD_RATE = 100_000_000  # bytes a second at which a model's files arrive


class CatalogPrediction(Frozen):
    """Prediction by a plan of a model for one GPU, with the family's defaults."""

    gpu: str
    memory_gb: float
    step_seconds: float | None = None  # of an optimizer step; None if nothing fits
    time_uncertainty: float | None = None
    """Standard error of `step_seconds`, as a share of it."""
    run_memory_bytes: int | None = None
    host_memory_bytes: int | None = None  # of a run; None if nothing fits, or it shares the host's
    settings: Candidate | None = None

    def image_seconds_with(self, defaults: Defaults) -> float | None:
        """Return the time of an image in a step of the family's batch; None if nothing fits."""
        return self.step_seconds and self.step_seconds / defaults.effective_batch_size

    def hours_with(self, defaults: Defaults) -> float | None:
        """Return the hours of the steps for the usual number of images; None if nothing fits."""
        steps = defaults.num_steps(USUAL_IMAGES)
        return self.step_seconds and steps * self.step_seconds / 3600


class ComparedGpu(CatalogPrediction):
    """One GPU in a comparison. Seconds, hours and cost are None if nothing fits."""

    misfit: str | None = None
    num_steps: int = 0
    image_seconds: float | None = None
    download_seconds: float | None = None  # until the model's files are there
    search_seconds: float | None = None
    other_seconds: float | None = None
    """Time of the run besides its steps: loading, caching, compiling, previews and checkpoints."""
    price_per_hour: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total_seconds(self) -> float | None:
        """Time from an empty machine to the finished adapter."""
        return self._total(0.0)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def hours_range(self) -> tuple[float, float] | None:
        """Hours at both ends of the range that is stated of step times."""
        low, high = (self._total(each * (self.time_uncertainty or 0.0)) for each in TIME_SIGMAS)
        return None if low is None or high is None else (low / 3600, high / 3600)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cost(self) -> float | None:
        total, price = self.total_seconds, self.price_per_hour
        return None if total is None or price is None else price * total / 3600

    def _total(self, slower: float) -> float | None:
        if self.step_seconds is None:
            return None
        besides = (self.download_seconds, self.search_seconds, self.other_seconds)
        steps = self.num_steps * self.step_seconds * math.exp(slower)
        return sum(seconds or 0.0 for seconds in besides) + steps


class Comparison(Frozen):
    """One job on several GPUs."""

    model: str
    gpus: tuple[ComparedGpu, ...]
    """Within the limits that were asked, in order; then those that nothing fits."""
    num_left_out: int = 0  # GPUs that it fits, but beyond the limits
    host_memory_bytes: int
    """Memory of each GPU's host, unless they share it."""
    currency: str = ""
    priced: str = ""


def compared_gpu(
    gpu: CatalogGpu, plan: TrainingPlan, *, download_seconds: float, price_per_hour: float | None
) -> ComparedGpu:
    """Describe a GPU that the job fits, from the plan that was predicted for it."""
    from autotune.search.next import SearchLimits

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
        host_memory_bytes=expected.host_memory_bytes,
        download_seconds=download_seconds,
        search_seconds=limits.allowed_seconds(expected.step_seconds),
        other_seconds=expected.other_seconds,
        price_per_hour=price_per_hour,
    )


def download_seconds(model: ResolvedModel) -> float:
    """Return the seconds until the model's files are here; 0 if they are."""
    if model.folder is not None:
        return 0.0
    num_transformers = 1 + len(model.family.other_denoisers)
    encoders = (read_parts(model) or Parts()).text_encoder_parameters  # autoencoders are small
    num_parameters = num_transformers * model.spec.num_parameters + sum(encoders)
    return BYTES_PER_PARAMETER * num_parameters / DOWNLOAD_RATE


def select_gpus(
    compared: Sequence[ComparedGpu],
    *,
    max_cost: float | None = None,
    max_hours: float | None = None,
) -> tuple[ComparedGpu, ...]:
    """Sort those that a job fits within the limits, then those that nothing fits, by name. The
    cheapest come first, then the fastest of those without a price."""

    def rank(one: ComparedGpu) -> tuple[float, float, str]:
        cost = math.inf if one.cost is None else one.cost
        return cost, one.total_seconds or 0.0, one.gpu

    def is_within(one: ComparedGpu) -> bool:
        is_cheap = max_cost is None or (one.cost is not None and one.cost <= max_cost)
        return is_cheap and (max_hours is None or (one.total_seconds or 0.0) <= 3600 * max_hours)

    fitting = [one for one in compared if one.misfit is None and is_within(one)]
    others = [one for one in compared if one.misfit is not None]
    return (*sorted(fitting, key=rank), *sorted(others, key=lambda one: one.gpu))


FILE = "predictions.json"  # shipped: what each model's plan predicts on each GPU, null if unfit


class NoGpu(NothingFits):
    """A published model cannot be tried without a GPU; `elsewhere` says which it fits."""

    model: str = ""
    family: str = ""
    gpu: str = "NAME"
    elsewhere: tuple[CatalogPrediction, ...] = ()

    @classmethod
    def build(cls, family: Family, model: PublishedModel) -> "NoGpu":
        """Build the error for a published model; it names the smallest GPU that it fits."""
        name = model.name
        predictions = catalog_predictions(name)
        fitting = [each for each in predictions if each.step_seconds is not None]
        smallest = min(
            fitting, key=lambda each: (each.memory_gb, each.step_seconds or 0.0), default=None
        )
        gpu = smallest.gpu if smallest else cls.gpu
        error = cls(
            f"{model.hub_id} cannot be tried here: this machine has no GPU",
            hint=cls.advice(f"autotune plan --hardware {gpu}, with otherwise the same options"),
        )
        error.model, error.family, error.gpu, error.elsewhere = name, family.name, gpu, predictions
        return error

    @staticmethod
    def advice(command: str) -> str:
        return f"plan for a GPU by name: {command}  (all: autotune probe --list)"


@cache
def catalog_predictions(model: str) -> tuple[CatalogPrediction, ...]:
    """Read the predictions for the cards that have some, the fastest first; cached."""
    known = json.loads(shipped_path(FILE).read_text())["models"].get(model, {})
    predictions = [
        CatalogPrediction(gpu=gpu.id, memory_gb=gpu.memory_nominal_gb, **(known[gpu.id] or {}))
        for gpu in load_catalog()
        if gpu.id in known
    ]
    predictions.sort(key=lambda each: (each.step_seconds or math.inf, each.gpu))
    return tuple(predictions)


LEVERS: Mapping[str, str] = {
    "modulation": setting_text("modulation", "ahead"),
    "norm_rope": setting_text("norm_rope", "fused"),
    **{name: TITLES[name] for name in ("selective_blocks", "swapped_blocks")},
    "quantization": f"quantized {TITLES['quantization']}",
    "compile": TITLES["compile"],
}


class ModelSummary(Frozen):
    """A published model that autotune knows by name."""

    name: str  # what `--model` takes, as it does the hub id
    family: str
    hub_id: str
    kind: Literal["image", "edit", "video"]
    """Kind of work: images, images of control images, or clips, which images train as well."""
    num_parameters: int | None
    is_verified: bool  # its build without files was compared with the published transformer
    license: str
    note: str
    levers: tuple[str, ...]
    missing_levers: Mapping[str, str]
    prediction: CatalogPrediction | None = None
    effective_batch_size: int
    """Images of a step, by default; `prediction` is for it."""
    image_seconds: float | None = None
    """Predicted time of an image; None if nothing fits, or without a GPU."""
    run_hours: float | None = None
    """Predicted hours of the steps of a run on 20 images."""


def summarize_models(
    gpu: str | None = None, predict: Callable[[str], CatalogPrediction] | None = None
) -> tuple[ModelSummary, ...]:
    """Summarize all published models by name; for a GPU of the catalog, the fastest run first. Its
    predictions are looked up, unless `predict` makes them by a model's name."""
    published = [(family, model) for family in FAMILIES.values() for model in family.models]
    planned: dict[str, CatalogPrediction] = {}
    found = []
    for family, model in published:
        if predict is None:
            predictions = catalog_predictions(model.name)
            prediction = next((each for each in predictions if each.gpu == gpu), None)
        else:
            made_of = repr((family.name, model.config, model.parts))  # as distilled models' bases
            if made_of not in planned:
                planned[made_of] = predict(model.name)
            prediction = planned[made_of]
        found.append(_summarize(family, model, prediction))
    return tuple(sorted(found, key=lambda each: (each.run_hours or math.inf, each.name)))


def _summarize(
    family: Family, model: PublishedModel, prediction: CatalogPrediction | None
) -> ModelSummary:
    missing = {
        title: family.excluded[knob] for knob, title in LEVERS.items() if knob in family.excluded
    }
    return ModelSummary(
        name=model.name,
        family=family.name,
        hub_id=model.hub_id,
        kind=family.kind,
        num_parameters=model.num_parameters or None,
        is_verified=bool(model.source),
        license=model.license,
        note=model.note,
        levers=tuple(title for title in LEVERS.values() if title not in missing),
        missing_levers=missing,
        prediction=prediction,
        effective_batch_size=family.defaults.effective_batch_size,
        image_seconds=prediction.image_seconds_with(family.defaults) if prediction else None,
        run_hours=prediction.hours_with(family.defaults) if prediction else None,
    )
