"""The models that can be planned for and trained, and fetching one."""

from pathlib import Path

from autotune.families import open_single_file, recognize
from autotune.hardware import gpu_named
from autotune.planning import ModelSummary, summarize_models


def list_models(
    hardware: str | None = None, *, file: str | Path | None = None
) -> tuple[ModelSummary, ...]:
    """Every published model that autotune knows by name, or those whose DiT or UNet a single file
    may be.

    Args:
        hardware: a GPU of the catalog, to tell what it is predicted to do with each; `4090` and the
            like.
        file: a file of ComfyUI, Kohya or Civitai. Models of one architecture differ in nothing that
            is in it; the one that its name fits best, for which it is taken, comes first.

    Raises:
        InvalidInput: the catalog has no such GPU, or the file holds no known model; the message
            says what it is.

    Example:
        >>> {model.name: model.num_parameters for model in autotune.list_models()}
        >>> [model.name for model in autotune.list_models(file="flux1-dev-fp8.safetensors")]
    """
    summaries = summarize_models(gpu_named(hardware).id if hardware else None)
    if file is None:
        return summaries
    by_id = {summary.hub_id: summary for summary in summaries}
    return tuple(by_id[model.hub_id] for _, model in recognize(open_single_file(Path(file))))
