"""Views of the single files of ComfyUI, kohya and Civitai as tensors of a diffusers model: its own
conversion runs on markers, whose values name a stored tensor and its row, and so tells which rows
to read from where they lie."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

from autotune.errors import first_line
from autotune.system.lazy import Tensor, nn, torch
from autotune.weights.files import BadWeights, ModelMismatch, TensorEntry, WeightSource
from autotune.weights.names import LAYOUTS, Layout
from autotune.weights.tensors import read_tensor

UNET_PREFIX = "model.diffusion_model."
PREFIXES = (UNET_PREFIX, "diffusion_model.", "net.")  # of a DiT or UNet in a checkpoint
PART_PREFIXES: Mapping[str, tuple[str, ...]] = {  # Stability's and ComfyUI's for other components
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("conditioner.embedders.0.transformer.", "text_encoders.clip_l.transformer."),
    "text_encoder_2": (
        "conditioner.embedders.1.model.",
        "text_encoders.clip_g.transformer.",
        "text_encoders.t5xxl.transformer.",
    ),
    "text_encoder_3": ("text_encoders.t5xxl.transformer.",),
    "text_conditioner": tuple(f"{each}llm_adapter." for each in (*PREFIXES, "")),  # Anima's
}

SCALES = (".scale_weight", ".weight_scale")  # of fp8 weights, in ComfyUI's older and newer files
# Endings of what such files hold for 8-bit products of activations.
UNUSED = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
DROPPED = re.compile(  # which conversions leave out
    r"norm_final\.weight|rope\.inv_freq|(?:video|audio)_embeddings_connector\..*"
)
NOT_ENCODER = ("position_ids", "logit_scale", "spiece_model", "tekken_model")
HEADS = ("text_projection", "lm_head")  # in files of text encoders, and not used by pipelines

FLUX_CLASSES = ("FluxTransformer2DModel", "ChromaTransformer2DModel")
FLUX_WIDTH = 3072  # the width at which diffusers splits the fused layers of any such model
MAX_ROWS = 1 << 20  # far above any DiT's or UNet's: a marker has 8 bytes for each row
ROW_BITS = 32

NAME_BASE = "name the folder or repository of its model with --base, or take another file"
Config = Mapping[str, Any]
Conversion = Callable[[dict[str, "Tensor"], Config], "Mapping[str, Tensor]"]
Shapes = Mapping[str, tuple[int, ...]]
Run = tuple[str, int, int]  # rows of a stored tensor: its name, the first one, and how many


class _Part(NamedTuple):
    source: WeightSource
    tensors: Mapping[str, TensorEntry]
    scales: Mapping[str, Tensor]  # by the name of the weight


@dataclass(frozen=True)
class TensorView(TensorEntry):
    """A tensor made of rows of stored ones."""

    pieces: tuple[tuple[int, int], ...] = ()  # (offset in the file, number of bytes)
    scale: Tensor | None = field(default=None, compare=False)  # of each row of scaled fp8
    is_transposed: bool = False

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        return self.pieces

    @property
    def is_mappable(self) -> bool:
        return self.scale is None and not self.is_transposed and len(self.pieces) == 1

    def finished(self, stored: Tensor) -> Tensor:
        if self.scale is None:
            return stored.T.contiguous() if self.is_transposed else stored
        return stored.float() * self.scale.to(stored.device).view(-1, *[1] * (stored.ndim - 1))


def view_as(source: WeightSource, model: nn.Module) -> WeightSource:
    """View the DiT or UNet of a single file under the names of `model`, else raise BadWeights."""
    return _view_converted(_read_part(source, PREFIXES), model)


def has_part(source: WeightSource, name: str) -> bool:
    """Return whether a checkpoint holds the component `name` besides the DiT or UNet."""
    return any(each.startswith(PART_PREFIXES.get(name, ())) for each in source.locations)


def view_part(source: WeightSource, name: str, model: nn.Module) -> WeightSource:
    """View the component `name` under the names of a diffusers folder, else raise BadWeights."""
    part = _read_part(source, PART_PREFIXES.get(name, ()))
    if name == "vae":
        return _view_converted(part, model)
    unused = tuple(f"{head}." for head in HEADS if not hasattr(model, head))
    tensors = {
        key: entry
        for key, entry in part.tensors.items()
        if not key.endswith(NOT_ENCODER) and not key.startswith(unused)
    }
    conversion = _open_clip if "transformer.resblocks.0.ln_1.weight" in tensors else None
    return _make_view(part._replace(tensors=tensors), model, conversion, {})


def first_names(source: WeightSource, kind: str, config: Config) -> set[str]:
    """Return beginnings of the names, as they are and as a model of class `kind` if it is one."""
    names: list[str] = []
    with suppress(BadWeights):
        part = _read_part(source, PREFIXES)
        names += part.tensors
        names += _find_rows(part, kind, config, _find_conversion(kind))
    return {name.partition(".")[0] for name in names}


def _read_part(source: WeightSource, prefixes: Iterable[str]) -> _Part:
    """The component with the first of `prefixes` that any name has, or all; reads only scales."""
    (file,) = source.files
    others = PART_PREFIXES["text_conditioner"] if prefixes is PREFIXES else ()
    names = [name for name in file.by_name if not name.startswith(others)]
    used = next((each for each in prefixes if any(name.startswith(each) for name in names)), "")
    used_names = [name for name in names if name.startswith(used)]
    entries = {name.removeprefix(used): file.by_name[name] for name in used_names}
    tensors = {n: e for n, e in entries.items() if not n.endswith((*SCALES, *UNUSED))}
    scales = {}
    for name, entry in entries.items():
        if name.endswith(SCALES):
            weight = f"{name.rpartition('.')[0]}.weight"
            if not _can_scale(tensors.get(weight), entry):
                what = f"{file.path}: {weight} is quantized in a way that is not understood"
                hint = "take the file in bf16, fp16 or scaled fp8; autotune quantizes by itself"
                raise BadWeights(what, hint=hint)
            scales[weight] = read_tensor(file, entry).float().reshape(-1)
    return _Part(source, tensors, scales)


def _can_scale(stored: TensorEntry | None, scale: TensorEntry) -> bool:
    # One factor for all of an fp8 weight, or one for each row.
    if stored is None or not stored.dtype.startswith("F8_E"):
        return False
    is_column = len(scale.shape) <= len(stored.shape) and set(scale.shape[1:]) <= {1}
    return is_column and scale.shape[:1] in ((), (1,), stored.shape[:1])


def _view_converted(part: _Part, model: nn.Module) -> WeightSource:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    is_converted = shapes.keys() <= part.tensors.keys()
    conversion = None if is_converted else _find_conversion(type(model).__name__)
    return _make_view(part, model, conversion, shapes)


def _make_view(
    part: _Part, model: nn.Module, conversion: Conversion | None, shapes: Shapes
) -> WeightSource:
    rows = _find_rows(part, type(model).__name__, cast(Any, model).config, conversion)
    used = {stored for runs, _ in rows.values() for stored, _, _ in runs}
    unused = part.tensors.keys() - used
    if unknown := sorted(name for name in unused if not DROPPED.fullmatch(name)):
        message = f"{part.source.path} has {unknown[0]}, for which the model has no place"
        raise ModelMismatch(message, hint=NAME_BASE)
    views = [
        _join_rows(name, shapes.get(name), runs, is_transposed, part)
        for name, (runs, is_transposed) in rows.items()
    ]
    views.sort(key=lambda view: view.pieces)
    (file,) = part.source.files
    return WeightSource(part.source.path, (replace(file, entries=tuple(views)),), is_view=True)


def _find_rows(
    part: _Part, kind: str, config: Config, conversion: Conversion | None
) -> dict[str, tuple[list[Run], bool]]:
    tensors = part.tensors
    if conversion is None:
        return {name: ([(name, 0, max((1, *e.shape[:1])))], False) for name, e in tensors.items()}
    order, unit = list(tensors), 1
    first = tensors.get("img_in.weight") if kind in FLUX_CLASSES else None
    if first and first.shape:  # a narrow FLUX has several rows of a marker for each of its own
        unit = max(1, FLUX_WIDTH // max(1, first.shape[0]))
    prefix = UNET_PREFIX if kind == "UNet2DConditionModel" else ""
    markers = {prefix + name: _mark(n, tensors[name], unit) for n, name in enumerate(order)}
    try:
        found = conversion(markers, config)
    except (LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)[:80]}"
        message = f"{part.source.path} does not hold a {kind}: {reason}"
        raise ModelMismatch(message, hint=NAME_BASE) from error
    return {name: _read_marker(name, marker, order, unit, part) for name, marker in found.items()}


def _mark(number: int, entry: TensorEntry, unit: int) -> Tensor:
    """A tensor of size 1 in all dimensions but the rows; its values are `number` and the row."""
    rows = entry.shape[0] if entry.shape else 1
    if not 0 < rows <= MAX_ROWS:
        message = f"{entry.name} has {rows} rows, which no DiT or UNet has"
        raise ModelMismatch(message, hint=NAME_BASE)
    values = (number << ROW_BITS) + torch.arange(rows * unit)
    return values.view(-1, *[1] * (len(entry.shape) - 1))


def _read_marker(
    name: str, marker: Tensor, order: list[str], unit: int, part: _Part
) -> tuple[list[Run], bool]:
    flat = marker.reshape(-1)
    source = part.tensors[order[int(flat[0]) >> ROW_BITS]]
    is_matrix = len(source.shape) > 1
    is_transposed = is_matrix and marker.shape == (1, len(flat)) != (1, 1)
    if is_matrix and len(flat) != len(marker) and not is_transposed:
        raise BadWeights(f"{name} reorders {source.name} within its rows", hint=NAME_BASE)
    starts = [0, *((flat.diff() != 1).nonzero().flatten() + 1).tolist()]
    runs = []
    for start, end in zip(starts, [*starts[1:], len(flat)], strict=True):
        number, row = divmod(int(flat[start]), 1 << ROW_BITS)
        if row % unit or (end - start) % unit:
            raise BadWeights(f"{name} has parts of rows of {order[number]}", hint=NAME_BASE)
        runs.append((order[number], row // unit, (end - start) // unit))
    return runs, is_transposed


def _join_rows(
    name: str, shape: tuple[int, ...] | None, runs: list[Run], is_transposed: bool, part: _Part
) -> TensorView:
    first, num_rows = part.tensors[runs[0][0]], sum(count for _, _, count in runs)
    pieces, factors = [], []
    for stored, row, count in runs:
        entry = part.tensors[stored]
        if (entry.dtype, entry.shape[1:]) != (first.dtype, first.shape[1:]):
            message = f"{name} is made of tensors that differ in dtype or width"
            raise BadWeights(message, hint=NAME_BASE)
        row_bytes = entry.size_bytes // (entry.shape[0] if entry.shape else 1)
        pieces.append((entry.start + row * row_bytes, count * row_bytes))
        factor = part.scales.get(stored, torch.ones(1))
        factors.append(factor.expand(count) if len(factor) == 1 else factor[row : row + count])
    as_stored = (num_rows, *first.shape[1:]) if first.shape else ()
    scale = torch.cat(factors) if any(stored in part.scales for stored, *_ in runs) else None
    if shape is None or math.prod(shape) != math.prod(as_stored):
        shape = as_stored  # which is refused later, with both shapes
    return TensorView(name, first.dtype, shape, pieces[0][0], tuple(pieces), scale, is_transposed)


LIKE = {  # VAEs that diffusers has no conversion for, and the class whose conversion suits them
    "AutoencoderKLQwenImage": "AutoencoderKLWan",
    "AutoencoderKLQwenImage21": "AutoencoderKLWan",
    "AutoencoderKLFlux2": "AutoencoderKL",
}
# Norms that diffusers knows as `.scale`; files of today's ComfyUI call them as all others.
SCALES_OF_NORMS = re.compile(r"((?:query|key)_norm|^distilled_guidance_layer\.norms\.\d+)\.weight$")
# A layer of Wan 2.2's VAE, each of whose stages holds its blocks and then the resampling one.
NESTED = re.compile(r"(encoder|decoder)\.(down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)")
NESTED_LAYERS = {
    "residual.0.": "norm1.",
    "residual.2.": "conv1.",
    "residual.3.": "norm2.",
    "residual.6.": "conv2.",
    "shortcut.": "conv_shortcut.",
}


def _find_conversion(kind: str) -> Conversion | None:
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    if found := SINGLE_FILE_LOADABLE_CLASSES.get(LIKE.get(kind, kind)):
        return partial(_convert, found["checkpoint_mapping_fn"])
    return partial(_rename, LAYOUTS[kind]) if kind in LAYOUTS else None


def _rename(layout: Layout, state: dict[str, Tensor], config: Config) -> Mapping[str, Tensor]:
    """Call layers as diffusers, which has no conversion, by the table of adapters' layers."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        parts = layout.parts(layer) if layout.has_originals([layer]) else [layer]
        rows = tensor.chunk(len(parts))
        found |= {f"{part}.{kind}": each for part, each in zip(parts, rows, strict=True)}
    return found


def _convert(
    function: Callable[..., Mapping[str, Tensor]], state: dict[str, Tensor], config: Config
) -> Mapping[str, Tensor]:
    """Run diffusers' conversion; it lacks stages of Wan 2.2's VAE and some layers of FLUX.2."""
    own, rest = {}, {}
    for written, tensor in state.items():
        name = SCALES_OF_NORMS.sub(r"\1.scale", written)
        name = name.replace("prompt_adaln_single", "prompt_adaln")
        if match := NESTED.match(name):
            own[_unnest(*match.groups())] = tensor
        elif name.startswith("bn."):
            own[name] = tensor
        else:
            rest[re.sub(r"^(?:en|de)coder\.((?:post_)?quant_conv\.)", r"\1", name)] = tensor
    return {**function(checkpoint=rest, config=config), **own}


def _unnest(side: str, way: str, stage: str, number: str, part: str) -> str:
    for original, layer in NESTED_LAYERS.items():
        if part.startswith(original):
            block = f"{side}.{way}_blocks.{stage}.resnets.{number}"
            return f"{block}.{layer}{part.removeprefix(original)}"
    return f"{side}.{way}_blocks.{stage}.{way}sampler.{part}"


def _open_clip(state: dict[str, Tensor], config: Config) -> Mapping[str, Tensor]:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    found: dict[str, Tensor] = convert_open_clip_checkpoint(None, state, prefix="")
    return found
