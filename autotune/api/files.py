"""Looking into what training reads and writes: data folders and weight files."""

from collections.abc import Callable
from pathlib import Path
from typing import Unpack, get_args

from autotune.api.options import require_known
from autotune.data.check import MAX_CROP, MAX_UPSCALING, DataReport, check_dataset
from autotune.data.items import make_options
from autotune.errors import InvalidInput, suggest_nearest
from autotune.events import OnEvent, Progressed, StatusChanged, ignore_event
from autotune.models.family import build_on_meta
from autotune.models.registry import get_family
from autotune.models.resolve import resolve_model
from autotune.plan.job import AdapterFormat, DataPlace, JobOverrides, ModelRef
from autotune.weights.adapters import read_adapter, write_adapter
from autotune.weights.files import read_header
from autotune.weights.tensors import FileSummary, inspect_file


def check_data(
    folder: DataPlace,
    *,
    model: str = "qwen-image",
    resolution_px: int | None = None,
    max_upscaling: float = MAX_UPSCALING,
    max_crop: float = MAX_CROP,
    on_event: OnEvent = ignore_event,
    **job: Unpack[JobOverrides],
) -> DataReport:
    """Look at every file of a data folder as training would, and name what is broken, tiny,
    duplicate or captionless.

    Args:
        folder: images with same-stem `.txt` captions, or a YAML file that lists such folders; or
            several of these.
        model: name of the model family whose sizes count.
        resolution_px: side of the square whose area every image is resized to; the family's by
            default.
        max_upscaling: factor per side above which enlarged images are counted.
        max_crop: share of an image's area above which cropped images are named.
        on_event: listener to progress.
        job: fields of the job that decide what is read, e.g. `num_frames=81`, `trigger="sks"`.

    Raises:
        InvalidInput: there is no such folder or family.

    Example:
        >>> report = autotune.check_data("photos")
        >>> report.can_train, report.problems
    """
    require_known(job, JobOverrides.__annotations__, "argument of check_data")
    family = get_family(model)
    num_frames = job.get("num_frames", family.defaults.num_frames)
    family.check_num_frames(num_frames)
    return check_dataset(
        folder,
        make_options(job, family, num_frames),
        resolution_px=resolution_px or family.defaults.resolution_px,
        multiple_px=family.size_multiple_px,
        max_side_px=family.max_side_px,
        max_upscaling=max_upscaling,
        max_crop=max_crop,
        on_progress=_progress_to(on_event, "reading"),
    )


def inspect_weights(
    path: str | Path, *, count_values: bool = True, on_event: OnEvent = ignore_event
) -> FileSummary:
    """Keys, shapes, dtypes, metadata and size of weights, and how many values are NaN or infinite.

    Args:
        path: a safetensors file, or a model: its folder or its index of shards.
        count_values: read all values; otherwise headers only, which is instant at any size.
        on_event: listener to progress, in bytes.

    Raises:
        BadWeights: the file is not safetensors, or damaged.

    Example:
        >>> autotune.inspect_weights("pytorch_lora_weights.safetensors").num_nonfinite
    """
    name = "counting NaN and infinite values"
    on_event(StatusChanged(text=name))
    return inspect_file(Path(path), values=count_values, on_progress=_progress_to(on_event, name))


def convert_weights(
    source: str | Path, target: str | Path, *, to: str = "diffusers", model: str | None = None
) -> None:
    """Write an adapter under the names that another program loads.

    Values, dtypes and alphas stay the same.

    Args:
        source: an adapter's file.
        target: file to write.
        to: `diffusers`, `comfyui` or `kohya`.
        model: family of an adapter whose names do not tell it.

    Raises:
        InvalidInput: the format does not exist, or `source` is no adapter.
        BadWeights: `source` cannot be read.

    Example:
        >>> autotune.convert_weights("run/pytorch_lora_weights.safetensors", "for-comfyui.safetensors", to="comfyui")
    """
    source, target = Path(source), Path(target)
    if to not in get_args(AdapterFormat):
        raise InvalidInput(
            f"there is no format {to!r}", hint=suggest_nearest(to, get_args(AdapterFormat))
        )
    read_header(source)
    named = resolve_model(ModelRef.of(model)) if model else None
    modules = build_on_meta(named.family, named.config).named_modules() if named else ()
    transformer = named.family.transformer_class if named else None
    adapter = read_adapter(source, [name for name, _ in modules], transformer)
    write_adapter(target, adapter, to, transformer)  # type: ignore[arg-type]


def _progress_to(on_event: OnEvent, name: str) -> Callable[[int, int], None]:
    return lambda done, total: on_event(Progressed(name=name, done=done, total=total))
