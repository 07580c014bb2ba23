"""Single-file models of ComfyUI, Kohya and Civitai, seen as the tensors of a diffusers model,
without a copy of any.

Such files have the authors' names, and fuse what diffusers keeps apart. diffusers' own conversion
runs on markers, whose values say which row of which stored tensor they stand for, so it tells of
every tensor of the model which stored rows it is. Rows are bytes one after the other: they are read
from where they lie.

    source = view_as(open_weights(file), transformer)      # nothing is read but scales
    load_into(transformer, source)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from autotune.errors import first_line
from autotune.system.process import lazy_module
from autotune.weights.files import BadWeights, KeyMismatch, TensorEntry, WeightSource
from autotune.weights.tensors import read_tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")

UNET_PREFIX = "model.diffusion_model."
PREFIXES = (UNET_PREFIX, "diffusion_model.")
"""What the names of a DiT or UNet begin with in a checkpoint that may hold other components as
well."""
SCALES = (".scale_weight", ".weight_scale")
"""Endings of the scales of fp8 weights, which are the stored values times the scale: ComfyUI's,
before and since it marks each layer with `.comfy_quant`."""
UNUSED = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""Endings of what such files hold for 8-bit products of activations."""
DROPPED = frozenset({"norm_final.weight"})
"""What conversions leave out on purpose: Z-Image's file has a layer that the model does not use."""
FIXED_WIDTHS = dict.fromkeys(
    ("FluxTransformer2DModel", "ChromaTransformer2DModel"), ("img_in.weight", 3072)
)
"""The tensor with as many rows as the model is wide, and the width at which diffusers'
conversion splits all models."""
MAX_ROWS = 1 << 20
"""Limit for the rows of one tensor, far above any DiT's or UNet's: a marker has 8 bytes for
each."""
ROW_BITS = 32

NAME_BASE = (
    "name the folder or repository that the file belongs to, by --base; or take another file"
)
if TYPE_CHECKING:
    Conversion: TypeAlias = Callable[[dict[str, Tensor], Mapping[str, Any]], Mapping[str, Tensor]]
else:
    Conversion = Any
"""Makes a state under diffusers' names of one under other names, for a model of a configuration."""
Run = tuple[str, int, int]
"""Rows of a stored tensor: its name, the first one, and how many."""


class StoredPart(NamedTuple):
    """One component in a single file, under the names that it has there, without a prefix."""

    source: WeightSource
    tensors: Mapping[str, TensorEntry]
    scales: Mapping[str, Tensor]
    """Scales of the weights that have one, by the name of the weight."""


@dataclass(frozen=True)
class TensorView(TensorEntry):
    """A tensor made of rows of stored ones."""

    pieces: tuple[tuple[int, int], ...] = ()
    """(offset from the beginning of the file, number of bytes) of each run of rows."""
    scale: Tensor | None = field(default=None, compare=False)
    """Factor of each row; None if the stored values are the weights."""
    is_turned: bool = False
    """Whether a square matrix is stored with its columns as rows."""

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        return self.pieces

    @property
    def is_mappable(self) -> bool:
        return self.scale is None and not self.is_turned and len(self.pieces) == 1

    def finished(self, stored: Tensor) -> Tensor:
        if self.scale is None:
            return stored.T.contiguous() if self.is_turned else stored
        return stored.float() * self.scale.to(stored.device).view(-1, *[1] * (stored.ndim - 1))


def view_as(source: WeightSource, model: nn.Module) -> WeightSource:
    """The DiT or UNet of a single file under the names of `model`, a diffusers model, which may be
    on meta.

    Its shapes are not checked: `load_into` and `check_source` do. A file that has the model's own
    names is taken as it is, but for a prefix and scales, and so is one of a class that diffusers
    has no conversion for.

    Raises:
        KeyMismatch: the file holds another model.
        BadWeights: it is stored in a way that is not understood.
    """
    part, shapes, kind = read_part(source, PREFIXES), shapes_of(model), type(model).__name__
    has_own_names = shapes.keys() <= part.tensors.keys() or not has_conversion(kind)
    return make_view(part, model, None if has_own_names else diffusers_conversion(kind), shapes)


def make_view(
    part: StoredPart,
    model: nn.Module,
    conversion: Conversion | None,
    shapes: Mapping[str, tuple[int, ...]],
    turned: Collection[str] = (),
) -> WeightSource:
    """Stored tensors under the names that `conversion` gives them, or their own; in the model's
    `shapes`, by name.

    `turned` names those that are stored with columns as rows.

    Raises KeyMismatch and BadWeights as `view_as`.
    """
    source, tensors, _ = part
    if conversion is None:
        runs = {name: [(name, 0, max((1, *entry.shape[:1])))] for name, entry in tensors.items()}
    else:
        runs = _convert(part, type(model).__name__, cast(Any, model).config, conversion)
    unknown = sorted(
        tensors.keys() - {stored for found in runs.values() for stored, _, _ in found} - DROPPED
    )
    if unknown:
        raise KeyMismatch(
            f"{source.path} has, but the model has no place for, {unknown[0]}", hint=NAME_BASE
        )
    views = [
        _view(name, shapes.get(name), name in turned, found, part) for name, found in runs.items()
    ]
    views.sort(key=lambda view: view.pieces)
    (file,) = source.files
    return WeightSource(source.path, (replace(file, entries=tuple(views)),), is_view=True)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a model, by name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def first_names(source: WeightSource, kind: str, config: Mapping[str, Any]) -> set[str]:
    """The first parts of the names that the file's tensors have in a diffusers model of class
    `kind`: a quick look.

    Raises BadWeights as `view_as`; if diffusers has no conversion, names are taken as they are.
    """
    part = read_part(source, PREFIXES)
    names = (
        _convert(part, kind, config, diffusers_conversion(kind))
        if has_conversion(kind)
        else part.tensors
    )
    return {name.partition(".")[0] for name in names}


def read_part(source: WeightSource, prefixes: Iterable[str]) -> StoredPart:
    """The component whose names begin with the first of `prefixes` that any name has; if none has,
    all of the file.

    Only scales are read. Raises BadWeights as `view_as`.
    """
    (file,) = source.files
    used = next(
        (prefix for prefix in prefixes if any(name.startswith(prefix) for name in file.by_name)), ""
    )
    entries = {
        name.removeprefix(used): entry
        for name, entry in file.by_name.items()
        if name.startswith(used)
    }
    tensors = {
        name: entry for name, entry in entries.items() if not name.endswith((*SCALES, *UNUSED))
    }
    scales: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if not name.endswith(SCALES):
            continue
        weight = f"{name.rpartition('.')[0]}.weight"
        stored = tensors.get(weight)
        if (
            stored is None
            or not stored.dtype.startswith("F8_E")
            or entry.shape not in _scale_shapes(stored)
        ):
            message = f"{file.path}: {weight} is quantized in a way that is not understood"
            raise BadWeights(
                message,
                hint="take the file in bf16, fp16 or scaled fp8; autotune quantizes by itself",
            )
        scales[weight] = read_tensor(file, entry).float().reshape(-1)
    return StoredPart(source, tensors, scales)


def _scale_shapes(stored: TensorEntry) -> tuple[tuple[int, ...], ...]:
    """Shapes of a scale: one for all, or one for each row."""
    rows = stored.shape[:1]
    return (), (1,), (1,) * len(stored.shape), rows, rows + (1,) * (len(stored.shape) - 1)


def has_conversion(kind: str) -> bool:
    """Whether diffusers converts single files of models of this class."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    return kind in SINGLE_FILE_LOADABLE_CLASSES


def diffusers_conversion(kind: str) -> Conversion:
    """diffusers' own, for models of a class that it has one for."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    function = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    return lambda state, config: function(checkpoint=state, config=config)


def _convert(
    part: StoredPart, kind: str, config: Mapping[str, Any], conversion: Conversion
) -> dict[str, list[Run]]:
    """The stored rows of each tensor of the model, by running the conversion on markers.

    Raises:
        KeyMismatch: the conversion does not find what it needs.
        BadWeights: it does more than to rename and to rearrange rows, or to turn a square matrix.
    """
    source, tensors, _ = part
    order, unit = list(tensors), _unit(kind, tensors)
    prefix = UNET_PREFIX if kind == "UNet2DConditionModel" else ""
    markers = {
        prefix + name: _mark(number, tensors[name], unit) for number, name in enumerate(order)
    }
    try:
        found = conversion(markers, config)
    except (LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        message = (
            f"{source.path} does not hold a {kind}: {type(error).__name__}: "
            f"{first_line(error)[:80]}"
        )
        raise KeyMismatch(message, hint=NAME_BASE) from error
    return {name: _runs(name, marker, order, unit, tensors) for name, marker in found.items()}


def _unit(kind: str, tensors: Mapping[str, TensorEntry]) -> int:
    """How many rows of a marker stand for one of a stored tensor: more than one for narrower
    models than published."""
    name, width = FIXED_WIDTHS.get(kind, ("", 1))
    rows = tensors[name].shape[:1] if name in tensors else ()
    return max(1, width // rows[0]) if rows and rows[0] else 1


def _mark(number: int, entry: TensorEntry, unit: int) -> Tensor:
    """A tensor of as many dimensions, all but the rows of size 1, whose values are `number` and
    the row."""
    rows = entry.shape[0] if entry.shape else 1
    if not 0 < rows <= MAX_ROWS:
        raise KeyMismatch(f"{entry.name} has {rows} rows, which no DiT or UNet has", hint=NAME_BASE)
    return ((number << ROW_BITS) + torch.arange(rows * unit)).view(
        -1, *[1] * (len(entry.shape) - 1)
    )


def _runs(
    name: str, marker: Tensor, order: list[str], unit: int, tensors: Mapping[str, TensorEntry]
) -> list[Run]:
    """The stored rows that a converted marker stands for. Raises BadWeights if it does not
    consist of whole rows."""
    flat = marker.reshape(-1)
    source = tensors[order[int(flat[0]) >> ROW_BITS]]
    if len(source.shape) > 1 and len(flat) != len(marker):
        raise BadWeights(f"{name} is {source.name} in another order than by rows", hint=NAME_BASE)
    starts = [0, *((flat.diff() != 1).nonzero().flatten() + 1).tolist()]
    found = []
    for start, end in zip(starts, [*starts[1:], len(flat)], strict=True):
        number, row = divmod(int(flat[start]), 1 << ROW_BITS)
        if row % unit or (end - start) % unit:
            raise BadWeights(f"{name} is no rows of {order[number]}", hint=NAME_BASE)
        found.append((order[number], row // unit, (end - start) // unit))
    return found


def _view(
    name: str, shape: tuple[int, ...] | None, is_turned: bool, runs: list[Run], part: StoredPart
) -> TensorView:
    """The tensor that is made of these rows; in the model's `shape` if it has as many elements."""
    _, tensors, scales = part
    first, num_rows = tensors[runs[0][0]], sum(count for _, _, count in runs)
    if any(
        (tensors[stored].dtype, tensors[stored].shape[1:]) != (first.dtype, first.shape[1:])
        for stored, *_ in runs
    ):
        raise BadWeights(f"{name} is made of tensors that differ in dtype or width", hint=NAME_BASE)
    pieces, factors = [], []
    for stored, row, count in runs:
        entry = tensors[stored]
        row_bytes = entry.size_bytes // (entry.shape[0] if entry.shape else 1)
        pieces.append((entry.start + row * row_bytes, count * row_bytes))
        factor = scales.get(stored, torch.ones(1))
        factors.append(factor.expand(count) if len(factor) == 1 else factor[row : row + count])
    as_stored = (num_rows, *first.shape[1:]) if first.shape else ()
    scale = torch.cat(factors) if any(stored in scales for stored, *_ in runs) else None
    if shape is None or math.prod(shape) != math.prod(as_stored):
        shape = as_stored  # which is refused later, with both shapes
    return TensorView(name, first.dtype, shape, pieces[0][0], tuple(pieces), scale, is_turned)


if TYPE_CHECKING:
    State: TypeAlias = dict[str, Tensor]
else:
    State = Any

OPEN_CLIP = "conditioner.embedders.1.model."
OPEN_CLIP_LAYER = "transformer.resblocks.0.ln_1.weight"
TURNED = "text_projection.weight"
"""The weight of OpenCLIP that is stored with columns as rows."""
PART_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("conditioner.embedders.0.transformer.", "text_encoders.clip_l.transformer."),
    "text_encoder_2": (
        OPEN_CLIP,
        "text_encoders.clip_g.transformer.",
        "text_encoders.t5xxl.transformer.",
    ),
    "text_encoder_3": ("text_encoders.t5xxl.transformer.",),
}
"""What the names of each component begin with in a checkpoint that holds others, too:
Stability's and ComfyUI's."""
NESTED = re.compile(
    r"(?P<side>encoder|decoder)\.(?P<way>down|up)samples\.(?P<stage>\d+)\.(?P=way)samples\.(?P<number>\d+)\.(?P<part>.+)"
)
"""A layer of the VAE of Wan 2.2, whose stages hold their blocks and then the one that changes
the size."""
NESTED_LAYERS = {
    "residual.0.": "norm1.",
    "residual.2.": "conv1.",
    "residual.3.": "norm2.",
    "residual.6.": "conv2.",
    "shortcut.": "conv_shortcut.",
}
IGNORED = ("position_ids", "logit_scale", "spiece_model", "tekken_model")
"""Endings of what is no weight of a text encoder."""
HEADS = ("text_projection", "lm_head")
"""Layers that files of text encoders may have and pipelines do not use."""


def has_part(source: WeightSource, name: str) -> bool:
    """Whether a checkpoint holds the component `name` beside the DiT or UNet."""
    return any(each.startswith(PART_PREFIXES.get(name, ())) for each in source.locations)


def view_part(source: WeightSource, name: str, model: nn.Module) -> WeightSource:
    """The component `name` of a single file, under the names that a folder in the diffusers layout
    has.

    Raises KeyMismatch and BadWeights as `view_as`.
    """
    part = read_part(source, PART_PREFIXES.get(name, ()))
    if name == "vae":
        shapes = shapes_of(model)
        has_own_names = shapes.keys() <= part.tensors.keys()
        return make_view(
            part, model, None if has_own_names else VAES.get(type(model).__name__), shapes
        )
    unused = tuple(f"{head}." for head in HEADS if not hasattr(model, head))
    tensors = {
        key: entry
        for key, entry in part.tensors.items()
        if not key.endswith(IGNORED) and not key.startswith(unused)
    }
    part = part._replace(tensors=tensors)
    if OPEN_CLIP_LAYER in tensors:
        return make_view(part, model, _open_clip, {}, {TURNED})
    return make_view(part, model, None, {})


def _ldm_vae(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    return diffusers_conversion("AutoencoderKL")(state, config)


def _wan_vae(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Wan 2.1's by diffusers' conversion; of what Wan 2.2 nests in each stage the stages by a
    map of our own."""
    nested = {name: match for name in state if (match := NESTED.match(name))}
    found = diffusers_conversion("AutoencoderKLWan")(
        {n: each for n, each in state.items() if n not in nested}, config
    )
    return {**found, **{_unnest(match): state[name] for name, match in nested.items()}}


def _unnest(name: re.Match[str]) -> str:
    stage, way, number, part = name["stage"], name["way"], name["number"], name["part"]
    for original, layer in NESTED_LAYERS.items():
        if part.startswith(original):
            return f"{name['side']}.{way}_blocks.{stage}.resnets.{number}.{layer}{part.removeprefix(original)}"
    return f"{name['side']}.{way}_blocks.{stage}.{way}sampler.{part}"


def _flux2_vae(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """That of FLUX.1 with the outer convolutions inside encoder and decoder, and a norm of the
    latents."""
    moved = {
        re.sub(r"(?:en|de)coder\.((?:post_)?quant_conv\.)", r"\1", key): tensor
        for key, tensor in state.items()
    }
    norm = {key: tensor for key, tensor in state.items() if key.startswith("bn.")}
    return {**_ldm_vae(moved, config), **norm}


def _open_clip(state: State, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    found: dict[str, Tensor] = convert_open_clip_checkpoint(None, state, prefix="")
    return {name: tensor.T if name == TURNED else tensor for name, tensor in found.items()}


VAES: Mapping[str, Conversion] = {
    "AutoencoderKL": _ldm_vae,
    "AutoencoderKLWan": _wan_vae,
    "AutoencoderKLQwenImage": _wan_vae,
    "AutoencoderKLQwenImage21": _wan_vae,
    "AutoencoderKLFlux2": _flux2_vae,
}
"""How the authors' names become diffusers', by class: Qwen-Image's VAE is laid out as Wan 2.1's,
that of Qwen-Image 2.1 as Wan 2.2's, with a dimension of time of size 1."""
