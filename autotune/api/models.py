"""The models that can be planned for and trained."""

from autotune.hardware import gpu_named
from autotune.planning import ModelSummary, summarize_models


def list_models(hardware: str | None = None) -> tuple[ModelSummary, ...]:
    """Every published model that autotune knows by name.

    Args:
        hardware: a GPU of the catalog, to tell what it is predicted to do with each; `4090` and the like.

    Raises InvalidInput if the catalog has no such GPU.

    Example:
        >>> {model.name: model.num_parameters for model in autotune.list_models()}
    """
    return summarize_models(gpu_named(hardware).id if hardware else None)
