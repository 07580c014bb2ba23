"""From a data folder to the workload: the shapes and lengths that decide memory and speed. Loads no weights."""

from autotune.errors import InvalidInput
from autotune.families.resolve import ResolvedModel
from autotune.schema import Bucket, Objective, Quality, Workload
from autotune.training.data.buckets import make_buckets
from autotune.training.data.dataset import Dataset
from autotune.training.data.pixels import read_size


def describe_workload(
    model: ResolvedModel,
    dataset: Dataset | None,
    *,
    resolution_px: int | None = None,
    rank: int | None = None,
    lora_alpha: float | None = None,
    targets: str = "attention",
    effective_batch_size: int | None = None,
    quality: Quality = "high",
    objective: Objective = "throughput",
) -> Workload:
    """The workload of training `model` on `dataset`; None takes the family's default.

    Without a dataset the workload is one square bucket and captions of the family's usual length.

    Raises:
        InvalidInput: a size is not positive, or the resolution is no multiple of what the model needs.
    """
    defaults, multiple = model.family.defaults, model.family.size_multiple_px
    resolution = resolution_px or defaults.resolution_px
    if resolution % multiple or resolution < multiple:
        nearest = max(multiple, round(resolution / multiple) * multiple)
        raise InvalidInput(
            f"a resolution of {resolution} px is no multiple of {multiple}, which {model.family.name} needs",
            hint=f"use --resolution {nearest}",
        )
    if dataset is None:
        buckets: tuple[Bucket, ...] = (Bucket(width_px=resolution, height_px=resolution, num_frames=1, num_items=1),)
        lengths = [defaults.text_tokens, defaults.text_tokens - 1]
    else:
        buckets = make_buckets(dataset, resolution, multiple)
        lengths = _text_lengths(model, dataset)
    chosen_rank = rank or defaults.rank
    return Workload(
        model=model.spec,
        resolution_px=resolution,
        buckets=buckets,
        max_text_tokens=max(lengths),
        text_padding="exact" if len(set(lengths)) == 1 else "masked",
        rank=chosen_rank,
        lora_alpha=lora_alpha or defaults.lora_alpha * chosen_rank / defaults.rank,
        targets=targets,
        effective_batch_size=effective_batch_size or defaults.effective_batch_size,
        quality=quality,
        objective=objective,
    )


def _text_lengths(model: ResolvedModel, dataset: Dataset) -> list[int]:
    if model.folder is None:
        return [model.family.defaults.text_tokens, model.family.defaults.text_tokens - 1]
    controls = _control_sizes(dataset)
    try:
        return model.family.count_text_tokens(model.folder, [item.caption for item in dataset.items], controls)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"the tokenizer in {model.folder} cannot be read: {str(error).splitlines()[0]}",
            hint="download the model again; a file is missing or damaged",
        ) from error


def _control_sizes(dataset: Dataset) -> list[list[tuple[int, int]]]:
    return [[read_size(path, decode=False) for path in item.control_paths] for item in dataset.items]
