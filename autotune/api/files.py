"""Looking into what training reads and writes: data folders and weight files."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from autotune.api.doors import takes
from autotune.data.check import DataReport, check_dataset
from autotune.data.items import make_options
from autotune.errors import InvalidInput, suggest_nearest
from autotune.events import OnEvent, Progressed, StatusChanged, ignore_event
from autotune.models.family import build_on_meta
from autotune.models.registry import get_family
from autotune.models.resolve import resolve_model
from autotune.plan.job import AdapterFormat, ModelRef
from autotune.plan.request import CheckDataRequest
from autotune.weights.adapters import read_adapter, write_adapter
from autotune.weights.files import read_header
from autotune.weights.tensors import FileSummary, inspect_file


@takes(CheckDataRequest, "data")
def check_data(request: CheckDataRequest) -> DataReport:
    """Look at every file of a data folder as training would, and name what is broken, tiny,
    duplicate or captionless.

    Raises:
        InvalidInput: there is no such folder or family.

    Example:
        >>> report = autotune.check_data("photos")
        >>> report.can_train, report.problems
    """
    family = get_family(request.model)
    num_frames = request.given.get("num_frames", family.defaults.num_frames)
    family.check_num_frames(num_frames)
    return check_dataset(
        request.data,
        make_options(request.given, family, num_frames),
        resolution_px=request.resolution_px or family.defaults.resolution_px,
        multiple_px=family.size_multiple_px,
        max_side_px=family.max_side_px,
        max_upscaling=request.max_upscaling,
        max_crop=request.max_crop,
        on_progress=_progress_to(request.on_event, "reading"),
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
