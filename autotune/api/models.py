"""The model families that can be planned for and trained."""

from autotune.families import FAMILIES, resolve_model
from autotune.schema import ModelSpec


def list_models() -> tuple[ModelSpec, ...]:
    """The published model of each family, with its size.

    Example:
        >>> {model.family: model.num_parameters for model in autotune.list_models()}
    """
    return tuple(resolve_model(name).spec for name in FAMILIES)
