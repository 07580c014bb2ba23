"""LoRA adapters as files, in the three formats that people exchange.

    diffusers   transformer.<module>.lora_A.weight, .lora_B.weight; rank and alpha in the metadata, where
                `load_lora_weights` looks for them
    comfyui     diffusion_model.<module>.lora_A.weight, .lora_B.weight, .alpha
    kohya       lora_unet_<module with underscores>.lora_down.weight, .lora_up.weight, .alpha

ComfyUI and kohya find a module by the name it has in their own model. That is diffusers' name, except in FLUX, where
it is the authors' (`flux_layers`), and where the comfyui format has lora_down and lora_up: so ComfyUI writes it, and
so diffusers understands it.
"""

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from pydantic import Field, ValidationError

from autotune.errors import InvalidInput, first_line
from autotune.schema import Frozen, NaturalInt, PositiveInt
from autotune.weights.errors import CorruptFile
from autotune.weights.flux_layers import (
    FLUX_CLASS,
    is_flux,
    is_original_flux,
    join_layers,
    original_names,
    split_layers,
)
from autotune.weights.layer import Layer
from autotune.weights.loaders import read_whole
from autotune.weights.saving import save_file

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", int, float)
AdapterFormat = Literal["diffusers", "comfyui", "kohya"]

INFO_KEY = "autotune"
MODULES_KEY = "autotune_modules"
DIFFUSERS_KEY = "lora_adapter_metadata"
"""Where diffusers keeps the configuration of peft. A file with `.alpha` tensors must not have it: diffusers would
apply alpha twice."""

PREFIXES: Mapping[AdapterFormat, str] = {
    "diffusers": "transformer.",
    "comfyui": "diffusion_model.",
    "kohya": "lora_unet_",
}
PARTS: Mapping[str, str] = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "alpha": "alpha",
}


EXPORT_AGAIN = "export or train the adapter again"
PLAIN_NAME = re.compile(r"\^?(?:[\w.-]|\\[.-])+")
"""The end of a module's name, or with `^` all of it, as peft writes it into a pattern."""


class AdapterInfo(Frozen):
    """Where an adapter comes from; stored beside its weights."""

    model: str
    """Hub id or folder name of the model that was adapted."""
    transformer: str | None = None
    """Class of its transformer in diffusers; None in files that were written before it was told."""
    plan_digest: str
    rank: int = PositiveInt
    alpha: float = Field(gt=0)
    training_steps: int = NaturalInt
    """Optimizer steps taken."""


@dataclass(frozen=True)
class Adapter:
    """An adapter apart from any format: layers by module name, and metadata that is about no format."""

    layers: Mapping[str, Layer]
    metadata: Mapping[str, str]

    @property
    def info(self) -> AdapterInfo | None:
        """Where it comes from, if autotune wrote it. Raises CorruptFile where that cannot be read."""
        text = self.metadata.get(INFO_KEY)
        try:
            return None if text is None else AdapterInfo.model_validate_json(text)
        except ValidationError as error:
            raise CorruptFile(f"the adapter's metadata is damaged: {error}", hint="train or export it again") from error


def save_adapter(path: Path, state: Mapping[str, "Tensor"], info: AdapterInfo) -> None:
    """Save what `peft.get_peft_model_state_dict(transformer)` gives, atomically, in the diffusers format.

    Every layer must have the rank of `info`. `pipeline.load_lora_weights(path)` then finds each key, rank and alpha.
    """
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    layers = _layers(bare, dict.fromkeys(_modules(bare), info.alpha))
    odd = [name for name, layer in layers.items() if layer.rank != info.rank]
    if odd:
        message = f"{odd[0]} has rank {layers[odd[0]].rank}, not {info.rank}"
        raise InvalidInput(message, hint="say the rank that was trained")
    write_adapter(path, Adapter(layers, {INFO_KEY: info.model_dump_json()}), "diffusers")


def read_adapter(path: Path, module_names: Iterable[str] = ()) -> Adapter:
    """Read an adapter in any of the formats.

    `module_names` are needed for a kohya file that another program wrote: its underscores do not say where the dots
    were. Raises BadWeights for a damaged or pickled file and InvalidInput for one that is no adapter.
    """
    return parse_adapter(*read_whole(path), module_names)


def write_adapter(path: Path, adapter: Adapter, to: AdapterFormat, transformer: str | None = None) -> None:
    """Write an adapter in the format `to`, atomically; `transformer` and errors as in `render_adapter`."""
    tensors, metadata = render_adapter(adapter, to, transformer)
    save_file(path, tensors, metadata)


def parse_adapter(
    state: Mapping[str, "Tensor"], metadata: Mapping[str, str], module_names: Iterable[str] = ()
) -> Adapter:
    """The adapter that tensors and metadata of a file describe, whichever format it is. Pure."""
    source = _format_of(state)
    bare = {name.removeprefix(PREFIXES[source]): tensor for name, tensor in state.items()}
    if source == "kohya":
        bare = _with_dots(bare, [*module_names, *_names_in(metadata), *original_names(_modules(bare))])
    kept = {key: value for key, value in metadata.items() if key == INFO_KEY}
    alphas = _config_alphas(metadata, _modules(bare)) if source == "diffusers" else {}
    layers = _layers(bare, alphas)
    with _of_fitting_shapes():
        return Adapter(split_layers(layers) if is_original_flux(layers) else layers, kept)


def _format_of(state: Mapping[str, "Tensor"]) -> AdapterFormat:
    for name in get_args(AdapterFormat):
        if state and all(key.startswith(PREFIXES[name]) for key in state):
            return name  # type: ignore[no-any-return]
    strange = sorted({key.split(".")[0] for key in state})
    message = f"not a LoRA adapter of a transformer: its keys begin with {', '.join(strange[:4]) or 'nothing'}"
    raise InvalidInput(message, hint="diffusers, ComfyUI and kohya files are understood")


def _split(key: str) -> tuple[str, str]:
    for suffix, part in PARTS.items():
        if key.endswith("." + suffix):
            return key.removesuffix("." + suffix), part
    raise InvalidInput(f"{key!r} is no part of a LoRA", hint="only plain LoRA is understood: no DoRA, LoKr or LoHa")


def _modules(bare: Mapping[str, "Tensor"]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_split(key)[0] for key in bare))


def _layers(bare: Mapping[str, "Tensor"], alphas: Mapping[str, float]) -> dict[str, Layer]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in bare.items():
        module, part = _split(key)
        parts.setdefault(module, {})[part] = tensor
    layers = {}
    for module, found in sorted(parts.items()):
        if not _fit_together(found):
            message = f"{module} lacks one of its two matrices, or they do not fit together"
            raise CorruptFile(message, hint=EXPORT_AGAIN)
        stored = found["alpha"].flatten().tolist() if "alpha" in found else [found["down"].shape[0]]
        alpha = alphas.get(module, float(stored[0]) if len(stored) == 1 else math.nan)
        if not math.isfinite(alpha):
            raise CorruptFile(f"the alpha of {module} is no finite number", hint=EXPORT_AGAIN)
        layers[module] = Layer(found["down"], found["up"], alpha)
    return layers


def _fit_together(found: "Mapping[str, Tensor]") -> bool:
    if not {"down", "up"} <= found.keys() or min(found["down"].ndim, found["up"].ndim) < 2:
        return False
    return found["down"].shape[0] == found["up"].shape[1] > 0 and found["down"].is_floating_point()


def _names_in(metadata: Mapping[str, str]) -> list[str]:
    try:
        names = json.loads(metadata.get(MODULES_KEY, "[]"))
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptFile(f"the metadata {MODULES_KEY!r} is no list of names", hint="export the adapter again")
    return names


def _with_dots(bare: Mapping[str, "Tensor"], module_names: Iterable[str]) -> dict[str, "Tensor"]:
    dotted = {name.replace(".", "_"): name for name in module_names}
    renamed = {}
    for key, tensor in bare.items():
        module, _, part = key.partition(".")
        if module not in dotted:
            message = f"cannot tell which module {module!r} is: kohya's names have lost their dots"
            raise InvalidInput(message, hint="give the model's module names: name the model it belongs to")
        renamed[f"{dotted[module]}.{part}"] = tensor
    return renamed


def _config_alphas(metadata: Mapping[str, str], modules: Iterable[str]) -> dict[str, float]:
    """Alpha of each module as peft reads it from the configuration: `alpha_pattern` first, then `lora_alpha`."""
    text = metadata.get(DIFFUSERS_KEY)
    if text is None:
        return {}
    try:
        config = json.loads(text)
        prefix = PREFIXES["diffusers"]
        patterns = {key: float(value) for key, value in config.get(prefix + "alpha_pattern", {}).items()}
        common = config.get(prefix + "lora_alpha")
        alphas = {} if common is None else dict.fromkeys(modules, float(common))
        for key in patterns:
            if not PLAIN_NAME.fullmatch(key):  # any other expression might never be done matching
                raise ValueError(f"{key!r} names no layer")
        for module in modules:
            found = [value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
            if found:
                alphas[module] = found[0]
    except (ValueError, TypeError, AttributeError, re.error) as error:
        raise CorruptFile(f"its LoRA configuration is damaged: {error}", hint="export the adapter again") from error
    return alphas


def render_adapter(
    adapter: Adapter, to: AdapterFormat, transformer: str | None = None
) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Tensors and metadata of the file that holds `adapter` in the format `to`. Pure.

    `transformer` is the class of the adapted model, for an adapter that does not say it. Raises InvalidInput where the
    names depend on it and nothing tells, or where the format has no name for a layer.
    """
    original = to != "diffusers" and _adapts_flux(adapter, transformer)
    with _of_fitting_shapes():
        layers = join_layers(adapter.layers) if original else adapter.layers
    down, up = ("lora_down", "lora_up") if to == "kohya" or original else ("lora_A", "lora_B")
    tensors: dict[str, Tensor] = {}
    for module, layer in layers.items():
        key = PREFIXES[to] + (module.replace(".", "_") if to == "kohya" else module)
        tensors[f"{key}.{down}.weight"] = layer.down
        tensors[f"{key}.{up}.weight"] = layer.up
        if to != "diffusers":
            tensors[f"{key}.alpha"] = _scalar(layer.alpha)
    if len(tensors) < len(layers) * (2 if to == "diffusers" else 3):
        raise InvalidInput("two modules have one name once dots are underscores", hint="choose diffusers or comfyui")
    return tensors, {**METADATA_OF[to](layers), **adapter.metadata}


@contextlib.contextmanager
def _of_fitting_shapes() -> Iterator[None]:
    """What is said where layers under FLUX's names cannot be taken apart or put together."""
    try:
        yield
    except (RuntimeError, ValueError, ZeroDivisionError, IndexError) as error:
        reason = first_line(error)
        raise CorruptFile(f"its layers do not have the shapes of FLUX: {reason}", hint=EXPORT_AGAIN) from error


def _adapts_flux(adapter: Adapter, transformer: str | None) -> bool:
    known = transformer or (adapter.info.transformer if adapter.info else None)
    flux = known == FLUX_CLASS if known else is_flux(adapter.layers)
    if flux is None:
        message = "this adapter may be of FLUX.1, whose layers other programs call otherwise, or of another model"
        raise InvalidInput(message, hint="name the model it belongs to: --model flux1-dev, --model qwen-image ...")
    return flux


def _scalar(value: float) -> "Tensor":
    """In float32 as others store it, or in float64 where that would round."""
    import torch

    short = torch.tensor(value, dtype=torch.float32)
    return short if short.item() == value else short.new_tensor(value, dtype=torch.float64)


def _peft_config(layers: Mapping[str, Layer]) -> dict[str, str]:
    """The configuration with which diffusers builds exactly these layers, whatever their ranks and alphas."""
    rank = _most_common(layer.rank for layer in layers.values())
    alpha = _most_common(layer.alpha for layer in layers.values())
    config = {
        "r": rank,
        "lora_alpha": alpha,
        # A pattern for whole names: in a list, `proj_out` would also mean `blocks.0.proj_out`.
        "target_modules": "|".join(re.escape(name) for name in layers),
        "rank_pattern": {f"^{re.escape(name)}": layer.rank for name, layer in layers.items() if layer.rank != rank},
        "alpha_pattern": {f"^{re.escape(name)}": x.alpha for name, x in layers.items() if x.alpha != alpha},
    }
    packed = {PREFIXES["diffusers"] + key: value for key, value in config.items()}
    return {DIFFUSERS_KEY: json.dumps(packed, indent=2, sort_keys=True)}


def _kohya_notes(layers: Mapping[str, Layer]) -> dict[str, str]:
    return {
        MODULES_KEY: json.dumps(list(layers)),
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(_most_common(layer.rank for layer in layers.values())),
        "ss_network_alpha": str(_most_common(layer.alpha for layer in layers.values())),
    }


METADATA_OF = {"diffusers": _peft_config, "comfyui": lambda _: {}, "kohya": _kohya_notes}


def _most_common(values: Iterable[Number]) -> Number:
    return Counter(values).most_common(1)[0][0]
