"""What the GPUs of the catalog are predicted to do with each family's defaults: computed ahead, so
it loads no library.

`benchmarks/predict_catalog.py` writes the file with the planner itself.
"""

import json
from functools import cache

from autotune.errors import NothingFits
from autotune.machine.catalog import load_catalog
from autotune.models.family import Family, PublishedModel
from autotune.plan.base import Frozen
from autotune.plan.candidate import Candidate
from autotune.system.files import shipped_path

FILE = "predictions.json"
"""In the shipped folder: for each published model and GPU what its plan predicts, or null if
nothing fits."""


class CatalogPrediction(Frozen):
    """What a plan of a model for one GPU predicts, with the family's defaults.

    Example:
        >>> [(model.name, model.prediction) for model in autotune.list_models("4090")]
    """

    gpu: str
    """Its name in the catalog."""
    memory_gb: float
    """Nominal memory of the card."""
    step_seconds: float | None = None
    """Time of an optimizer step; None if nothing fits."""
    time_uncertainty: float | None = None
    """Standard error of `step_seconds`, as a share of it."""
    run_memory_bytes: int | None = None
    """Run memory: of the phase that needs most."""
    settings: Candidate | None = None


class NoGpu(NothingFits):
    """A published model cannot be tried, since this machine has no GPU. `elsewhere` says which GPUs
    it fits.

    Example:
        >>> try:
        ...     autotune.require_gpu("qwen-image")
        ... except autotune.NoGpu as error:
        ...     print([each.gpu for each in error.elsewhere if each.step_seconds is not None])
    """

    model: str = ""
    family: str = ""
    gpu: str = "NAME"
    """The smallest that it fits."""
    elsewhere: tuple[CatalogPrediction, ...] = ()

    @classmethod
    def build(cls, family: Family, model: PublishedModel) -> "NoGpu":
        """The error for a family's published model; it names the smallest GPU that it fits."""
        name = model.name or family.name
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
        """The hint with a command."""
        return f"plan for a GPU by name: {command}  (all: autotune probe --list)"


@cache
def _read_file() -> dict[str, dict[str, dict[str, object] | None]]:
    found: dict[str, dict[str, dict[str, object] | None]] = json.loads(
        shipped_path(FILE).read_text()
    )["models"]
    return found


@cache
def catalog_predictions(model: str) -> tuple[CatalogPrediction, ...]:
    """For every GPU of the catalog, the fastest first and those that the model does not fit
    last; empty if unknown."""
    known = _read_file().get(model, {})
    predictions = (
        CatalogPrediction.model_validate(
            {"gpu": gpu.id, "memory_gb": gpu.memory_nominal_gb, **(known[gpu.id] or {})}
        )
        for gpu in load_catalog()
        if gpu.id in known
    )
    return tuple(
        sorted(predictions, key=lambda each: (each.step_seconds or float("inf"), each.gpu))
    )
