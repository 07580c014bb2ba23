"""The names of layers in ComfyUI and kohya's scripts, those of the models' authors; and the layers
of adapters, which are joined and split as these names ask.

A layer of the authors may be several of diffusers, in the order of its rows. Both programs' own
sources, with commits, are in `tests/clients`, which the tables in `names.yaml` are tested against.
FLUX's `norm_out` is left out: its rows are in another order there.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import ClassVar

from autotune.errors import InvalidInput
from autotune.plan.job import AdapterFormat
from autotune.system.files import read_table
from autotune.system.lazy import Tensor, torch

Parts = tuple[str, ...]
BLOCK = re.compile(  # the number of a repeated block; of a UNet, of a repeated block within a stage
    r"(^blocks|^layers|refiner\.blocks|(?:transformer|double|single|joint|layerwise|refiner)_blocks)([._])(\d+)(?=[._])"
)


@dataclass(frozen=True)
class Layout:
    """One model's layers under both names; # stands for the number of a block."""

    parts_of: Mapping[str, Parts]  # diffusers' layers in each layer of the authors
    width_ratios: Mapping[str, int]  # outputs for each input, which tell models of like names apart
    # Layers that, with two rows for each input, make shifts before scales, diffusers' after.
    swapped: frozenset[str] = frozenset()
    gated: frozenset[str] = frozenset()  # layers whose halves are swapped in any case
    kohya_has_own_names: bool = True  # of the authors, as ComfyUI always

    @cached_property
    def original_of(self) -> dict[str, str]:
        return {part: original for original, parts in self.parts_of.items() for part in parts}

    def parts(self, original: str) -> list[str]:
        """List diffusers' layers in one of the authors', else raise KeyError."""
        key, number = split_number(original)
        return [part.replace("#", number) for part in self.parts_of[key]]

    def original(self, layer: str) -> str:
        key, number = split_number(layer)
        return self.original_of[key].replace("#", number)

    def has_originals(self, names: Iterable[str]) -> bool:
        return all(split_number(name)[0] in self.parts_of for name in names)

    def has_layers(self, names: Iterable[str]) -> bool:
        return all(split_number(name)[0] in self.original_of for name in names)

    def has_widths(self, widths: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether a layer has the outputs that this model's has."""
        ends = [split_number(name)[0].partition("#.")[2] for name in widths]
        pairs = zip(ends, widths.values(), strict=True)
        return any(size[1] == size[0] * self.width_ratios.get(end, 0) for end, size in pairs)


def split_number(name: str) -> tuple[str, str]:
    """Split a name into one with # for its block's number, and that number or ''."""
    number = BLOCK.search(name)
    return (BLOCK.sub(r"\1\2#", name, count=1), number[3]) if number else (name, "")


def expand(text: str) -> list[str]:
    """List the words of a text, `a.{b,c}` as `a.b` and `a.c`, with braces in braces."""
    while found := re.search(r"(\S*?)\{([^{}]*)\}(\S*)", text):
        words = " ".join(found[1] + one + found[3] for one in found[2].split(","))
        text = text[: found.start()] + words + text[found.end() :]
    return text.split()


def _read_layers(written: Mapping[str, str | Mapping[str, str]]) -> dict[str, Parts]:
    found: dict[str, Parts] = {}
    for key, value in written.items():
        if isinstance(value, str):
            names = expand(key)
            parts = names if value == "=" else expand(value)
            size = len(parts) // len(names)
            own = (tuple(parts[at * size : (at + 1) * size]) for at in range(len(names)))
            found |= zip(names, own, strict=True)
            continue
        inner, (theirs, ours) = _read_layers(value), map(expand, key.split(" = "))
        for before, place in zip(theirs, ours, strict=True):
            for name, own_parts in inner.items():
                found[before + name] = tuple(place + part for part in own_parts)
    return found


FLUX1_CLASS, CHROMA_CLASS = "FluxTransformer2DModel", "ChromaTransformer2DModel"
SD3_CLASS, COSMOS_CLASS = "SD3Transformer2DModel", "CosmosTransformer3DModel"
_TABLE = read_table("weights/names.yaml")
LAYOUTS: Mapping[str, Layout] = {
    name: Layout(
        _read_layers(written),
        _TABLE["width_ratios"].get(name, {}),
        frozenset(_TABLE["swapped"].get(name, ())),
        frozenset(_TABLE["gated"].get(name, ())),
        kohya_has_own_names=name not in _TABLE["diffusers_in_kohya"],
    )
    for name, written in _TABLE["layers"].items()
}
KEPT_NAMES = frozenset(_TABLE["diffusers_in_both"])
NOT_READ_BY: Mapping[AdapterFormat, tuple[str, Sequence[str]]] = _TABLE["not_read_by"]
READ_IN_PART: dict[AdapterFormat, Mapping[str, tuple[str, str, str]]] = _TABLE["read_in_part"]
NUM_FLUX1_DOUBLE_BLOCKS, NUM_SD3_BLOCKS = 19, 38  # of Stable Diffusion 3.5 Large


def find_class(layers: Iterable[str]) -> str | None:
    """Find the class that has these layers, by diffusers' names.

    Empty if none in LAYOUTS has them, None if several may: Stable Diffusion 3.5 has all names of
    FLUX.1's double blocks, Qwen-Image those of its attention, LTX those of Cosmos's blocks.
    Chroma's layers pass for FLUX.1's, which other programs call the same.
    """
    names = tuple(layers)
    fitting = [
        name
        for name, layout in LAYOUTS.items()
        if name != CHROMA_CLASS and names and layout.has_layers(names)
    ]
    numbers = [int(number) for _, number in map(split_number, names) if number]
    if not fitting or not numbers:
        return ""
    if fitting == [COSMOS_CLASS]:
        return None
    is_flux = any(name.startswith("single_") for name in names)
    if len(fitting) == 1 and (fitting[0] != FLUX1_CLASS or is_flux):
        return fitting[0]
    if max(numbers) < NUM_FLUX1_DOUBLE_BLOCKS:
        return None
    if max(numbers) >= NUM_SD3_BLOCKS:
        return ""
    return SD3_CLASS if SD3_CLASS in fitting and any(".ff" in name for name in names) else None


def can_write(to: AdapterFormat, transformer: str) -> bool:
    """Return whether the names of the format are known for a model of this class."""
    return to == "diffusers" or transformer in LAYOUTS or transformer in KEPT_NAMES


def find_layout(widths: Mapping[str, tuple[int, int]], transformer: str | None) -> Layout | None:
    """Find the layout of the authors' names; by (inputs, outputs) where they are alike."""
    known = [LAYOUTS[name] for name in LAYOUTS if name == (transformer or name)]
    fitting = [layout for layout in known if widths and layout.has_originals(widths)]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return next((layout for layout in fitting if layout.has_widths(widths)), fitting[-1])


def restore_dots(kohya_names: Iterable[str]) -> list[str]:
    """List dotted names for those with underscores that any layout has."""
    names = chain.from_iterable(
        layout.parts_of if layout.kohya_has_own_names else layout.original_of
        for layout in LAYOUTS.values()
    )
    dotted = {name.replace(".", "_"): name for name in names}
    keys = [split_number(name) for name in kohya_names]
    return [dotted[key].replace("#", number) for key, number in keys if key in dotted]


MLP_RATIO = 4  # rows of FLUX.1's `proj_mlp` for each input


@dataclass(frozen=True)
class LoraLayer:
    """The two matrices of one adapted module; its update is `up @ down * alpha / rank`."""

    down: Tensor  # (rank, inputs)
    up: Tensor  # (outputs, rank)
    alpha: float
    magnitude: Tensor | None = None  # (outputs,) norms of DoRA; None of a LoRA

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.up), int(self.down.shape[1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.down, self.up


@dataclass(frozen=True)
class KroneckerLayer:
    """The factors of a LoKr's module by their names in files; its update is `kron(w1, w2)`, and
    either may be a product itself."""

    factors: Mapping[str, Tensor]
    magnitude: ClassVar[None] = None

    def matrix(self, name: str) -> Tensor:
        """Return `lokr_w1` or `lokr_w2`, multiplied out."""
        if name in self.factors:
            return self.factors[name]
        a, b = self.factors[f"{name}_a"], self.factors[f"{name}_b"]
        core = self.factors.get(name.replace("w", "t"))
        return a @ b if core is None else torch.einsum("ij...,ip,jr->pr...", core, a, b)

    def matrix_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of `matrix` without making it: a small file may ask for any size.

        Raises KeyError or RuntimeError if its factors are missing or do not fit together.
        """
        on_meta = {part: tensor.to("meta") for part, tensor in self.factors.items()}
        return tuple(KroneckerLayer(on_meta).matrix(name).shape)

    @property
    def is_whole(self) -> bool:
        return {"lokr_w1", "lokr_w2"} <= self.factors.keys()

    @property
    def rank(self) -> int:
        """That of a product, or one with which peft keeps both whole."""
        b = self.factors.get("lokr_w2_b", self.factors.get("lokr_w1_b"))
        return len(b) if b is not None else max(self.factors["lokr_w2"].shape[:2])

    @property
    def alpha(self) -> float:
        """With which LyCORIS adds the factors as they are."""
        return float(self.rank)

    @property
    def shape(self) -> tuple[int, int]:
        left, right = self.matrix_shape("lokr_w1"), self.matrix_shape("lokr_w2")
        return left[0] * right[0], left[1] * right[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.factors.values())

    def scaled(self, scale: float) -> "KroneckerLayer":
        """Return it with its update multiplied."""
        first = "lokr_w1" if "lokr_w1" in self.factors else "lokr_w1_a"
        changed = {first: self.factors[first] * scale} if scale != 1 else {}
        return KroneckerLayer({**self.factors, **changed})


def factorize(size: int, factor: int) -> tuple[int, int]:
    """Cut a layer's side in two as LyCORIS and peft do: by `factor`, if it divides, else with the
    first as near to the root as it can be, and, unless `factor` is 0, below it."""
    if factor and size % factor == 0:
        return factor, size // factor
    limit = min(factor or size, math.isqrt(size))
    first = next(number for number in range(limit, 0, -1) if size % number == 0)
    return first, size // first


def lokr_shapes(
    shape: Sequence[int], rank: int, factor: int, *, decompose_both: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors that peft makes for a weight of this shape, by name."""
    (rows, row_size), (columns, column_size) = (factorize(size, factor) for size in shape[:2])
    found: dict[str, tuple[int, ...]] = {"lokr_w1": (rows, columns)}
    if decompose_both and rank < max(rows, columns) / 2:
        found = {"lokr_w1_a": (rows, rank), "lokr_w1_b": (rank, columns)}
    if rank >= max(row_size, column_size) / 2:
        return found | {"lokr_w2": (row_size, column_size, *shape[2:])}
    width = column_size * math.prod(shape[2:])
    return found | {"lokr_w2_a": (row_size, rank), "lokr_w2_b": (rank, width)}


Layer = LoraLayer | KroneckerLayer


def join_layers(layers: Mapping[str, Layer], layout: Layout) -> dict[str, Layer]:
    """Join layers to those of the authors. Raises InvalidInput for a layer without such a name, or
    for a part of one in a LoKr."""
    joined: dict[str, Layer] = {}
    for name, layer in layers.items():
        try:
            original = layout.original(name)
        except KeyError as error:
            message = f"{name} has no name in the code of the model's authors"
            raise InvalidInput(message, hint="choose the format diffusers") from error
        parts = layout.parts(original)
        if len(parts) == 1:
            joined[original] = _swap_halves(layer, original, layout)
        elif isinstance(layer, KroneckerLayer):
            message = f"{name} is a part of {original}, and no LoKr of that does the same"
            raise InvalidInput(message, hint="choose the format diffusers, or train a LoRA")
        elif original not in joined:
            joined[original] = _join([layers.get(part) for part in parts], parts)  # type: ignore[misc]
    return joined


def split_layers(layers: Mapping[str, Layer], layout: Layout) -> dict[str, Layer]:
    """Invert `join_layers`; each part gets its rows of `up` and all of `down`."""
    split: dict[str, Layer] = {}
    for name, layer in layers.items():
        parts = layout.parts(name)
        if len(parts) == 1:
            split[parts[0]] = _swap_halves(layer, name, layout)
        elif isinstance(layer, KroneckerLayer):
            message = f"{name} is {' and '.join(parts)} in diffusers, and a LoKr has no such parts"
            raise InvalidInput(message, hint="use it in the program that it was made for")
        else:
            split |= _split(layer, parts)
    return split


def _swap_halves(layer: Layer, original: str, layout: Layout) -> Layer:
    name, has_two = split_number(original)[0], layer.shape[0] == 2 * layer.shape[1]
    if name not in layout.gated and not (name in layout.swapped and has_two):
        return layer
    if isinstance(layer, KroneckerLayer):
        first = "lokr_w1" if "lokr_w1" in layer.factors else "lokr_w1_a"
        half, rest = divmod(len(layer.factors[first]), 2)
        if rest:
            message = f"the halves of {original} are in another order there, and its LoKr has none"
            raise InvalidInput(message, hint="train it with an even --factor, or a LoRA")
        return KroneckerLayer({**layer.factors, first: layer.factors[first].roll(half, 0)})
    return replace(layer, up=layer.up.roll(len(layer.up) // 2, 0))


def _join(layers: list[LoraLayer | None], parts: list[str]) -> LoraLayer:
    """Stack layers, None for one that was not adapted, filled with zeros to the largest rank."""
    adapted = [layer for layer in layers if layer is not None]
    first, rank = adapted[0], max(layer.rank for layer in adapted)
    scale, inputs = first.alpha / first.rank, first.down.shape[1]
    downs, ups = [], []
    for layer, part in zip(layers, parts, strict=True):
        rows = inputs * (MLP_RATIO if part.endswith("mlp") else 1)
        down = first.down.new_zeros(rank, inputs)
        up = first.up.new_zeros(len(first.up) if len(parts) < 4 else rows, rank)
        if layer is not None:
            own = layer.alpha / layer.rank
            down[: layer.rank] = layer.down
            up[:, : layer.rank] = layer.up if own == scale else layer.up * (own / scale)
        downs.append(down)
        ups.append(up)
    up = torch.block_diag(*ups)  # type: ignore[no-untyped-call]  # torch's own
    return LoraLayer(torch.cat(downs), up, first.alpha * len(parts) * (rank / first.rank))


def _split(layer: LoraLayer, parts: list[str]) -> dict[str, LoraLayer]:
    width = len(layer.up) // len(parts) if len(parts) < 4 else layer.down.shape[1]
    sizes = [width] * min(3, len(parts)) + [len(layer.up) - 3 * width] * (len(parts) - 3)
    rows: tuple[Tensor, ...] = layer.up.split(sizes)  # type: ignore[no-untyped-call]  # torch's own
    rank, rest = divmod(layer.rank, len(parts))
    blocks = [block.chunk(len(parts), dim=1) for block in rows] if rank and not rest else []
    if not blocks or any(
        block[j].any() for i, block in enumerate(blocks) for j in range(len(parts)) if i != j
    ):
        return {
            part: LoraLayer(layer.down, up.clone(), layer.alpha)
            for part, up in zip(parts, rows, strict=True)
        }
    split = {}
    for i, part in enumerate(parts):
        down, up = layer.down[i * rank : (i + 1) * rank], blocks[i][i]
        used = torch.logical_or(down.any(dim=1), up.any(dim=0))
        if used.any():  # else it was not adapted
            share = int(used.sum()) / rank
            split[part] = LoraLayer(down[used], up[:, used], layer.alpha / len(parts) * share)
    return split
