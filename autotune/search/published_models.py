"""Which of the settings that spare memory or time a family's models have, and why not the
others: data alone."""

from collections.abc import Mapping
from typing import Literal

from autotune.models.family import Family, PublishedModel
from autotune.models.registry import FAMILIES
from autotune.plan.base import Frozen
from autotune.search.elsewhere import CatalogPrediction, catalog_predictions

LEVERS: Mapping[str, str] = {
    "modulation": "modulation ahead",
    "norm_rope": "fused norm and RoPE",
    "selective_blocks": "kept attention",
    "swapped_blocks": "block swap",
    "quantization": "quantized weights",
    "compile": "compiled blocks",
}
"""What people call them, by knob."""


def missing_levers(family: Family) -> dict[str, str]:
    """The reason for each lever that the family lacks, by what people call the lever."""
    return {
        title: family.excluded[knob] for knob, title in LEVERS.items() if knob in family.excluded
    }


class ModelSummary(Frozen):
    """A published model that autotune knows by name.

    Example:
        >>> [(model.name, model.license) for model in autotune.list_models() if model.kind == "video"]
    """

    name: str
    """What `--model` takes; the hub id does as well."""
    family: str
    hub_id: str
    kind: Literal["image", "edit", "video"]
    """What it makes: images, images of control images, or clips, which images train as well."""
    num_parameters: int | None
    """Number of parameters of the transformer; None if the family does not state it."""
    is_verified: bool
    """Whether the transformer that is built without its files was compared with the published
    one."""
    license: str
    """License that its card names; empty if that is not known."""
    note: str
    """What whoever trains it should know."""
    levers: tuple[str, ...]
    """What it has of the settings that spare memory or time."""
    missing_levers: Mapping[str, str]
    """Why it lacks the other settings."""
    prediction: CatalogPrediction | None = None
    """What the GPU that was asked for is predicted to do with the family's defaults; None if
    that was not computed."""

    @classmethod
    def build(cls, family: Family, model: PublishedModel, gpu: str | None) -> "ModelSummary":
        """Summarize a model for the GPU of that name in the catalog."""
        name, missing = model.name or family.name, missing_levers(family)
        return cls(
            name=name,
            family=family.name,
            hub_id=model.hub_id,
            kind=family.kind,
            num_parameters=model.num_parameters or None,
            is_verified=bool(model.source),
            license=model.license,
            note=model.note,
            levers=tuple(title for title in LEVERS.values() if title not in missing),
            missing_levers=missing,
            prediction=next((each for each in catalog_predictions(name) if each.gpu == gpu), None),
        )


def summarize_models(gpu: str | None = None) -> tuple[ModelSummary, ...]:
    """All published models, family by family; `gpu` is a name in the catalog."""
    return tuple(
        ModelSummary.build(family, model, gpu)
        for family in FAMILIES.values()
        for model in family.models
    )
