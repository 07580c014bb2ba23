"""LoRA and LoKr adapters as files, in the three formats that people exchange.

    diffusers   transformer.<module>.lora_A.weight, .lora_B.weight, for a UNet unet.<module>...;
                ranks in the metadata, where `load_lora_weights` looks for them
    comfyui     diffusion_model.<module>.lora_A.weight, .lora_B.weight
    kohya       lora_unet_<module with underscores>.lora_down.weight, .lora_up.weight, .alpha

All have .lokr_w1, .lokr_w2 of a LoKr, or products of .lokr_w2_a, .lokr_w2_b, as LyCORIS names them.
Its alpha counts only with such a product, but in peft's configuration always: it becomes part of
the values as soon as it is read.

ComfyUI and kohya find a module by its name in their own model: the authors' (`names`), or
diffusers' own. ComfyUI ignores an alpha in the metadata, and diffusers does not take most models'
from `.alpha`: the first two formats have it in their values. `NOT_READ_BY` tells the rest, and what
would be `READ_IN_PART` is not written.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mode
from typing import Any

from pydantic import Field, ValidationError

from autotune.errors import InvalidInput, first_line
from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.job import AdapterFormat
from autotune.system.files import read_table
from autotune.system.lazy import Tensor, torch
from autotune.weights.files import BadWeights, CorruptFile
from autotune.weights.names import (
    CHROMA_CLASS,
    FLUX1_CLASS,
    LAYOUTS,
    NOT_READ_BY,
    READ_IN_PART,
    KroneckerLayer,
    Layer,
    Layout,
    LoraLayer,
    can_write,
    find_class,
    find_layout,
    join_layers,
    lokr_shapes,
    restore_dots,
    split_layers,
)
from autotune.weights.tensors import load_file, save_file

INFO_KEY = "autotune"
MODULES_KEY = "autotune_modules"
DIFFUSERS_KEY = "lora_adapter_metadata"  # peft's configuration

PREFIXES: Mapping[str, AdapterFormat] = {
    "transformer.": "diffusers",
    "unet.": "diffusers",
    "diffusion_model.": "comfyui",
    "lora_unet_": "kohya",
    "lora_transformer_": "kohya",  # OneTrainer's
    "lycoris_": "kohya",  # LyCORIS's, as SimpleTuner uses it
}
UNET_STAGES = ("down_blocks.", "mid_block.", "up_blocks.")
PARTS: Mapping[str, str] = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "alpha": "alpha",
    "lora_magnitude_vector": "magnitude",
    **{f"lokr_{x}": f"lokr_{x}" for x in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
}

EXPORT_AGAIN = "export or train the adapter again"
NAME_MODEL = "name the model it belongs to: --model flux1-dev, --model qwen-image ..."
# The end of a module's name, or with `^` all of it; any other pattern might never be done matching.
PLAIN_NAME = re.compile(r"\^?(?:[\w.-]|\\[.-])+")


class AdapterInfo(Frozen):
    """Origin of an adapter; stored in its metadata."""

    model: str
    transformer: str | None = None
    plan_digest: str
    rank: int = PositiveInt
    alpha: float = Field(gt=0)
    training_steps: int = NaturalInt


@dataclass(frozen=True)
class Adapter:
    """An adapter independent of any format: layers by module name, and metadata of no format."""

    layers: Mapping[str, Layer]
    metadata: Mapping[str, str]
    component: str = "transformer"

    @property
    def is_lokr(self) -> bool:
        return any(isinstance(layer, KroneckerLayer) for layer in self.layers.values())

    @property
    def info(self) -> AdapterInfo | None:
        """Origin, if autotune wrote it. Raises CorruptFile if that cannot be read."""
        text = self.metadata.get(INFO_KEY)
        try:
            return None if text is None else AdapterInfo.model_validate_json(text)
        except ValidationError as error:
            message = f"the adapter's metadata is damaged: {error}"
            raise CorruptFile(message, hint=EXPORT_AGAIN) from error


def save_adapter(
    path: Path, state: Mapping[str, Tensor], info: AdapterInfo, component: str = "transformer"
) -> None:
    """Save what `get_peft_model_state_dict` returns for `load_lora_weights`, atomically."""
    bare = {name.removeprefix(f"{component}."): tensor for name, tensor in state.items()}
    names = _module_names(bare)
    alphas, ranks = (dict.fromkeys(names, value) for value in (info.alpha, float(info.rank)))
    layers = _collect_layers(bare, alphas, ranks)
    for name, layer in layers.items():
        if isinstance(layer, LoraLayer) and layer.rank != info.rank:
            message = f"{name} has rank {layer.rank}, not {info.rank}"
            raise InvalidInput(message, hint="give the rank that was trained")
    write_adapter(path, Adapter(layers, {INFO_KEY: info.model_dump_json()}, component), "diffusers")


def read_adapter(
    path: Path, module_names: Iterable[str] = (), transformer: str | None = None
) -> Adapter:
    """Read an adapter of finite values in any of the formats, else raise InvalidInput.
    `module_names` are needed for a kohya file of another program, whose underscores do not say
    where dots were, and `transformer`, the model's class, for names that several models have."""
    adapter = parse_adapter(*load_file(path), module_names, transformer)
    for name, layer in adapter.layers.items():
        if not all(tensor.isfinite().all() for tensor in layer.tensors):
            message = f"{path}: {name} has values that are not finite"
            raise BadWeights(message, hint="take an earlier checkpoint, or download it again")
    return adapter


def write_adapter(
    path: Path, adapter: Adapter, to: AdapterFormat, transformer: str | None = None
) -> None:
    """Write an adapter atomically; errors as of `serialize_adapter`."""
    save_file(path, *serialize_adapter(adapter, to, transformer))


def parse_adapter(
    state: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    module_names: Iterable[str] = (),
    transformer: str | None = None,
) -> Adapter:
    """Parse tensors and metadata of a file in any of the formats."""
    prefix = _detect_prefix(state)
    source = PREFIXES[prefix]
    bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    kept = {key: value for key, value in metadata.items() if key == INFO_KEY}
    if source == "diffusers":
        names = _module_names(bare)
        alphas, ranks = (_configured(metadata, prefix, names, what) for what in ("alpha", "rank"))
        return Adapter(_collect_layers(bare, alphas, ranks), kept, prefix[:-1])
    if source == "kohya":
        bare = _restore_dots(bare, [*module_names], _stored_module_names(metadata))
    adapter = Adapter(_collect_layers(bare, {}, {}), kept)
    layers = adapter.layers
    widths = {name: layer.shape[::-1] for name, layer in layers.items()}
    if layout := find_layout(widths, transformer or _stored_class(adapter)):
        with _reraise_bad_shapes():
            layers = split_layers(layers, layout)
    is_unet = any(name.startswith(UNET_STAGES) for name in layers)
    return replace(adapter, layers=layers, component="unet" if is_unet else "transformer")


def require_layers(source: Path, adapter: Adapter, modules: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless each layer is one of the model's `modules`, by name and size."""
    unknown = sorted(name for name in adapter.layers if not hasattr(modules.get(name), "weight"))
    if unknown:
        called = find_class(adapter.layers)
        hint = f"they have the names of a {called}: name such a model" if called else ""
        raise _unknown_layers(unknown, len(adapter.layers), f"which {source} adapts", hint)
    for name, layer in adapter.layers.items():
        module = modules[name]
        sizes = [getattr(module, f"{side}_features", None) for side in ("in", "out")]
        if None not in sizes and sizes != [*layer.shape[::-1]]:
            message = f"{source} is for another model: {name} differs in shape"
            raise InvalidInput(message, hint="name that model")


def _unknown_layers(unknown: Sequence[str], total: int, which: str, hint: str = "") -> InvalidInput:
    more = f", nor {len(unknown) - 1} more of its layers" if len(unknown) > 1 else ""
    message = f"the model has no layer {unknown[0]}{more}, {which}"
    if not hint and len(unknown) == total:
        hint = (
            "it is for another model, or names layers in a way that autotune does not know: name "
        )
        hint += "its model with --model, or use it in the program that made it"
    rest = f"its other {total - len(unknown)} are the model's: leave these out, which changes what"
    return InvalidInput(
        message, hint=hint or f"{rest} it does, or use it in the program that made it"
    )


def _stored_class(adapter: Adapter) -> str | None:
    return adapter.info.transformer if adapter.info else None


def _detect_prefix(state: Mapping[str, Tensor]) -> str:
    for begin, (what, hint) in read_table("weights/names.yaml")["foreign"].items():
        if key := next((key for key in state if re.match(begin, key)), None):
            raise InvalidInput(f"{key!r} {what}", hint=hint)
    for prefix in PREFIXES:
        if state and all(key.startswith(prefix) for key in state):
            return prefix
    unknown = sorted({key.split(".")[0] for key in state})
    begin = ", ".join(unknown[:4]) or "nothing"
    what = f"not a LoRA adapter of a transformer: its keys begin with {begin}"
    raise InvalidInput(what, hint="diffusers, ComfyUI and kohya files are understood")


def _split_key(key: str) -> tuple[str, str]:
    for suffix, part in PARTS.items():
        if key.endswith("." + suffix):
            return key.removesuffix("." + suffix), part
    others = read_table("weights/names.yaml")["other_kinds"]
    kind = next((kind for kind, parts in others.items() if re.search(parts, key)), "no LoRA")
    raise InvalidInput(
        f"{key!r} is part of {kind}",
        hint="LoRA, LoKr and diffusers' DoRA are understood: train one, or merge "
        "this one into the model with its program, and name that by --model",
    )


def _module_names(bare: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_split_key(key)[0] for key in bare))


def _collect_layers(
    bare: Mapping[str, Tensor], alphas: Mapping[str, float], ranks: Mapping[str, float]
) -> dict[str, Layer]:
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in bare.items():
        module, part = _split_key(key)
        # torch has no arithmetic for fp8
        is_fp8 = tensor.is_floating_point() and tensor.itemsize == 1
        modules.setdefault(module, {})[part] = tensor.to(torch.bfloat16) if is_fp8 else tensor
    layers: dict[str, Layer] = {}
    for module, parts in sorted(modules.items()):
        factors = {name: tensor for name, tensor in parts.items() if name.startswith("lokr_")}
        if not (_are_factors(factors) if factors else _is_pair(parts)):
            message = f"{module} lacks one of its two matrices, or they do not fit together"
            raise CorruptFile(message, hint=EXPORT_AGAIN)
        made = KroneckerLayer(factors) if factors else None
        rank = ranks.get(module, made.rank) if made else parts["down"].shape[0]
        stored = parts["alpha"].flatten().tolist() if "alpha" in parts else [rank]
        if made and made.is_whole:
            stored = [rank]
        alpha = alphas.get(module, float(stored[0]) if len(stored) == 1 else math.nan)
        if not math.isfinite(alpha):
            raise CorruptFile(f"the alpha of {module} is not a finite number", hint=EXPORT_AGAIN)
        layers[module] = (
            made.scaled(alpha / rank)
            if made
            else LoraLayer(parts["down"], parts["up"], alpha, parts.get("magnitude"))
        )
    if len({*map(type, layers.values())}) > 1:
        message = "some of its layers are a LoRA's, others a LoKr's"
        raise InvalidInput(message, hint="use it in the program that it was made for")
    return layers


def _are_factors(factors: Mapping[str, Tensor]) -> bool:
    names = ("lokr_w1", "lokr_w2")
    try:
        shapes = [KroneckerLayer(factors).matrix_shape(name) for name in names]
    except (KeyError, RuntimeError):
        return False
    is_given_twice = any({name, f"{name}_a"} <= factors.keys() for name in names)
    are_matrices = all(len(shape) > 1 and math.prod(shape) for shape in shapes)
    are_numbers = all(tensor.is_floating_point() for tensor in factors.values())
    return are_matrices and are_numbers and not is_given_twice


def _is_pair(parts: Mapping[str, Tensor]) -> bool:
    if not {"down", "up"} <= parts.keys() or min(parts["down"].ndim, parts["up"].ndim) < 2:
        return False
    return parts["down"].shape[0] == parts["up"].shape[1] > 0 and parts["down"].is_floating_point()


def _stored_module_names(metadata: Mapping[str, str]) -> list[str]:
    try:
        names = json.loads(metadata.get(MODULES_KEY, "[]"))
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptFile(f"the metadata {MODULES_KEY!r} is not a list of names", hint=EXPORT_AGAIN)
    return names


def _restore_dots(
    bare: Mapping[str, Tensor], of_model: Sequence[str], stored: Sequence[str]
) -> dict[str, Tensor]:
    modules = _module_names(bare)
    known = (*of_model, *stored, *restore_dots(modules))
    dotted = {name.replace(".", "_"): name for name in known}
    if unknown := [module for module in modules if module not in dotted]:
        if of_model:
            raise _unknown_layers(unknown, len(modules), "once dots are underscores")
        message = f"cannot tell which module {unknown[0]!r} is: kohya's names have lost their dots"
        raise InvalidInput(message, hint=NAME_MODEL)
    keys = ((key, *key.partition(".")) for key in bare)
    return {f"{dotted[module]}.{part}": bare[key] for key, module, _, part in keys}


def _configured(
    metadata: Mapping[str, str], prefix: str, modules: Iterable[str], what: str
) -> dict[str, float]:
    """Alpha or rank of each module as peft reads it: `alpha_pattern` first, then `lora_alpha`."""
    if DIFFUSERS_KEY not in metadata:
        return {}
    try:
        config = json.loads(metadata[DIFFUSERS_KEY])
        patterns = {
            key: float(value) for key, value in config.get(f"{prefix}{what}_pattern", {}).items()
        }
        for key in patterns:
            if not PLAIN_NAME.fullmatch(key):
                raise ValueError(f"{key!r} names no layer")
        keys = ("lora_alpha", "alpha") if what == "alpha" else ("r",)
        default = next((config[prefix + key] for key in keys if prefix + key in config), None)
        alphas = {} if default is None else dict.fromkeys(modules, float(default))
        order = {key.replace("\\", ""): number for number, key in enumerate(patterns)}
        values = tuple(patterns.values())
        for module in modules:
            parts = module.split(".")
            endings = (f"^{module}", *(".".join(parts[start:]) for start in range(len(parts))))
            if matches := [order[ending] for ending in endings if ending in order]:
                alphas[module] = values[min(matches)]
    except (ValueError, TypeError, AttributeError) as error:
        message = f"its LoRA configuration is damaged: {error}"
        raise CorruptFile(message, hint=EXPORT_AGAIN) from error
    return alphas


def serialize_adapter(
    adapter: Adapter, to: AdapterFormat, transformer: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Make tensors and metadata of a file in the format `to`, else raise InvalidInput;
    `transformer` is the model's class, for an adapter that does not store it."""
    if to != "diffusers" and any(layer.magnitude is not None for layer in adapter.layers.values()):
        what = "a DoRA can only be written in the diffusers format"
        raise InvalidInput(what, hint="train --adapter lora for others")
    layout = None if to == "diffusers" else _find_layout(adapter, to, transformer)
    prefix = {
        "diffusers": f"{adapter.component}.",
        "comfyui": "diffusion_model.",
        "kohya": "lora_unet_",
    }[to]
    if to == "comfyui" and layout and _is_read_in_parts(adapter, layout):
        prefix, layout = "transformer.", None
    with _reraise_bad_shapes():
        layers = join_layers(adapter.layers, layout) if layout else adapter.layers
    # By lora_down diffusers knows authors' names of FLUX.1 as such.
    is_flux1 = layout in (LAYOUTS[FLUX1_CLASS], LAYOUTS[CHROMA_CLASS])
    down, up = ("lora_down", "lora_up") if to == "kohya" or is_flux1 else ("lora_A", "lora_B")
    if to != "kohya":
        layers = {name: _fold_alpha(layer) for name, layer in layers.items()}
    keys = {name: prefix + (name.replace(".", "_") if to == "kohya" else name) for name in layers}
    if len({*keys.values()}) < len(keys):
        message = "two modules have one name once dots are underscores"
        raise InvalidInput(message, hint="choose diffusers or comfyui")
    tensors: dict[str, Tensor] = {}
    for module, layer in layers.items():
        key = keys[module]
        if isinstance(layer, KroneckerLayer):
            tensors |= {f"{key}.{name}": tensor for name, tensor in layer.factors.items()}
        else:
            tensors[f"{key}.{down}.weight"] = layer.down
            tensors[f"{key}.{up}.weight"] = layer.up
        if layer.magnitude is not None:
            tensors[f"{key}.lora_magnitude_vector"] = layer.magnitude
        if to == "kohya":
            is_short = torch.tensor(layer.alpha, dtype=torch.float32).item() == layer.alpha
            dtype = torch.float32 if is_short else torch.float64
            tensors[f"{key}.alpha"] = torch.tensor(layer.alpha, dtype=dtype)
    metadata: dict[str, str] = {}
    if to == "diffusers":
        metadata = _peft_metadata(layers, prefix)
    elif to == "kohya":
        metadata = _kohya_metadata(layers)
    return tensors, {**metadata, **adapter.metadata}


def _is_read_in_parts(adapter: Adapter, layout: Layout) -> bool:
    # ComfyUI puts a LoKr into rows of one of its layers, if diffusers' name of them tells it to.
    is_known = layout not in [LAYOUTS.get(name) for name in NOT_READ_BY["diffusers"][1]]
    parts = (layout.parts(layout.original(name)) for name in adapter.layers)
    return is_known and adapter.is_lokr and any(len(each) > 1 for each in parts)


@contextlib.contextmanager
def _reraise_bad_shapes() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, ZeroDivisionError, IndexError) as error:
        message = f"its layers do not have the shapes of its model: {first_line(error)}"
        raise CorruptFile(message, hint=EXPORT_AGAIN) from error


def _find_layout(adapter: Adapter, to: AdapterFormat, transformer: str | None) -> Layout | None:
    known = transformer or _stored_class(adapter)
    if known and not can_write(to, known):
        message = f"autotune does not know what {to} calls the layers of a {known}"
        raise InvalidInput(message, hint="keep the adapter in the diffusers format")
    found = known or find_class(adapter.layers)
    if found is None:
        raise InvalidInput(
            "this adapter may be for one of several models, whose layers other programs name "
            "differently",
            hint=NAME_MODEL,
        )
    program, layers, better = READ_IN_PART.get(to, {}).get(found, ("", "(?!)", ""))
    if any(re.search(layers, name) for name in adapter.layers):
        message = f"in the format {to}, {program} finds only some layers of a {found}"
        hint = f"choose the format {better}, which ComfyUI and diffusers read whole"
        raise InvalidInput(message, hint=hint)
    layout = LAYOUTS.get(found)
    return layout if layout and (layout.kohya_has_own_names or to != "kohya") else None


def _fold_alpha(layer: Layer) -> Layer:
    if isinstance(layer, KroneckerLayer) or layer.alpha == layer.rank:
        return layer
    return replace(layer, up=layer.up * (layer.alpha / layer.rank), alpha=float(layer.rank))


def _peft_metadata(layers: Mapping[str, Layer], prefix: str) -> dict[str, str]:
    rank = mode(layer.rank for layer in layers.values())
    ranks = {f"^{re.escape(name)}": x.rank for name, x in layers.items() if x.rank != rank}
    lokr = [layer for layer in layers.values() if isinstance(layer, KroneckerLayer)]
    config = {
        "r": rank,
        "alpha" if lokr else "lora_alpha": rank,
        # A pattern for whole names: in a list, `proj_out` would also mean `blocks.0.proj_out`.
        "target_modules": "|".join(re.escape(name) for name in layers),
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        **(_lokr_options(lokr) if lokr else {}),
    }
    if any(layer.magnitude is not None for layer in layers.values()):
        config["use_dora"] = True
    packed = {prefix + key: value for key, value in config.items()}
    return {DIFFUSERS_KEY: json.dumps(packed, indent=2, sort_keys=True)}


def _lokr_options(layers: list[KroneckerLayer]) -> dict[str, bool | int]:
    both = any("lokr_w1_a" in layer.factors for layer in layers)
    made = [{name: (*tensor.shape,) for name, tensor in x.factors.items()} for x in layers]
    for factor in (0, *sorted({layer.matrix_shape("lokr_w1")[0] for layer in layers})):
        if made == [lokr_shapes(x.shape, x.rank, factor, decompose_both=both) for x in layers]:
            return {"decompose_factor": factor or -1, "decompose_both": both}
    what = "diffusers makes no LoKr of such shapes: no single factor gives them"
    raise InvalidInput(what, hint="choose the format comfyui")


def _kohya_metadata(layers: Mapping[str, Layer]) -> dict[str, str]:
    kind = "lokr" if any(isinstance(x, KroneckerLayer) for x in layers.values()) else "lora"
    return {
        MODULES_KEY: json.dumps(list(layers)),
        "ss_network_module": f"networks.{kind}",
        "ss_network_dim": str(mode(layer.rank for layer in layers.values())),
        "ss_network_alpha": str(mode(layer.alpha for layer in layers.values())),
    }
