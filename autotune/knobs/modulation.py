"""Modulation ahead of time: layers that depend on the noise level alone are in no step.

The noise levels of all draws are known before a run, so what the layers make of them is computed
for a window of coming draws at a time, on the device, layer by layer.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotune.models.family import Family

# Of the host's memory for a window's modulations, however long the run; one step at least.
MAX_WINDOW_BYTES = 1 << 30
# More make the products hardly faster, and a small model's window only longer to wait for.
MAX_WINDOW_DRAWS = 256


def window_steps(row_bytes: int, images_per_step: int) -> int:
    """Return the optimizer steps of a window, for so many bytes a draw and images a step."""
    draws = min(MAX_WINDOW_DRAWS, MAX_WINDOW_BYTES // max(1, row_bytes))
    return max(1, draws // images_per_step)


ATTRIBUTE = "modulation_ahead"  # name of the module that the transformer gets

# Every tensor of the layers once, by its name, in the dtype to compute in.
Stream = Callable[[], Generator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class ModulationLayer:
    """A layer that has left the model, and where its outputs lie in a row."""

    name: str
    # Its parameters on the meta device, in the dtype that the model was built in.
    shapes: Mapping[str, Tensor]
    start: int
    stop: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"{self.name}.{leaf}": tensor for leaf, tensor in self.shapes.items()}


class ModulationPart(nn.Module):
    """Stands where a modulation layer was: takes its outputs from rows of all layers' outputs."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, rows: Tensor) -> Tensor:
        return rows[..., self.start : self.stop]


class ModulationAhead(nn.Module):
    """Rows for a transformer without its modulation layers: `table` (draws, row) is on the host."""

    table: Tensor | None

    def __init__(self, layers: Sequence[ModulationLayer], num_embedders: int) -> None:
        super().__init__()
        self.layers, self.width = tuple(layers), layers[-1].stop
        self.dtype = next(iter(layers[0].shapes.values())).dtype
        self.table, self.num_embedders = None, num_embedders
        self._stream: Stream | None = None
        self._rows: dict[bytes, Tensor] = {}
        self._collected: dict[bytes, Tensor] | None = None
        self._embedded: list[Tensor] = []
        self._inputs: list[Tensor] = []

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for layer in self.layers for name, tensor in layer.tensors.items()}

    def connect(self, stream: Stream, dtype_of: Callable[[str, torch.dtype], torch.dtype]) -> None:
        """Say where the layers' weights come from, and in which dtypes the model is computed."""
        self._stream = stream
        self.set_dtype(dtype_of)

    def set_dtype(self, dtype_of: Callable[[str, torch.dtype], torch.dtype]) -> None:
        first = next(iter(self.tensors.items()))
        self.dtype = dtype_of(first[0], first[1].dtype)

    @contextmanager
    def collecting(self, family: Family, transformer: nn.Module) -> Iterator[dict[bytes, Tensor]]:
        """Run no block meanwhile, and collect what the transformer is conditioned on."""
        blocks = {name: transformer.get_submodule(name) for name in family.block_lists}
        self._collected = {}
        try:
            for name in blocks:
                transformer.set_submodule(name, nn.ModuleList())
            with torch.no_grad():
                yield self._collected
        finally:
            self._collected = None
            for name, block in blocks.items():
                transformer.set_submodule(name, block)

    def hold(self, collected: Mapping[bytes, Tensor], capacity: int) -> None:
        """Compute a window's rows from conditionings by key, with room for `capacity`."""
        conditionings = torch.stack(list(collected.values()))
        self._rows = {}
        if self.table is None or len(self.table) < len(conditionings):
            size, pinned = (max(capacity, len(conditionings)), self.width), conditionings.is_cuda
            self.table = None  # before another is made
            self.table = torch.empty(size, dtype=self.dtype, pin_memory=pinned)
        self._compute(conditionings, self.table)
        self._rows = dict(zip(collected, self.table, strict=False))

    @contextmanager
    def holding_also(self, collected: Mapping[bytes, Tensor]) -> Iterator[None]:
        """Compute rows besides the window's, and forget them afterwards."""
        missing = {key: each for key, each in collected.items() if key not in self._rows}
        if missing:
            table = torch.empty(len(missing), self.width, dtype=self.dtype)
            self._compute(torch.stack(list(missing.values())), table)
            self._rows |= dict(zip(missing, table, strict=True))
        try:
            yield
        finally:
            for key in missing:
                self._rows.pop(key, None)

    def replace_conditioning(
        self, number: int, _: nn.Module, args: Any, kwargs: dict[str, Any], embedded: Tensor
    ) -> Tensor:
        """Make the last embedder's output rows, as a forward hook; those before it add nothing."""
        if number == 0:
            self._embedded, self._inputs = [], []
        self._embedded.append(embedded)
        self._inputs += [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if number < self.num_embedders - 1:
            return embedded.new_zeros(())
        conditioning, inputs = sum(self._embedded[1:], self._embedded[0]), self._inputs
        self._embedded, self._inputs = [], []
        if conditioning.is_meta:
            return conditioning.new_empty(len(conditioning), self.width, dtype=self.dtype)
        num_items = len(conditioning)
        own = [tensor for tensor in inputs if tensor.ndim in (1, 2) and len(tensor) == num_items]
        numbers = torch.cat([tensor.reshape(num_items, -1).float() for tensor in own], dim=1)
        keys = [row.tobytes() for row in numbers.cpu().numpy()]
        if self._collected is not None:
            self._collected |= dict(zip(keys, conditioning, strict=True))
            return conditioning.new_zeros((), dtype=self.dtype).expand(len(keys), self.width)
        rows = conditioning.new_empty(len(keys), self.width, dtype=self.dtype)
        if any(key not in self._rows for key in keys):
            self._compute(conditioning, rows)
            return rows
        for row, key in zip(rows, keys, strict=True):
            row.copy_(self._rows[key], non_blocking=True)
        return rows

    @torch.no_grad()
    def _compute(self, conditionings: Tensor, rows: Tensor) -> None:
        assert self._stream is not None
        activated, device = nn.functional.silu(conditionings), conditionings.device
        layers = {name: layer for layer in self.layers for name in layer.tensors}
        arrived: dict[str, dict[str, Tensor]] = {}
        with closing(self._stream()) as stream:
            for name, tensor in stream:
                layer = layers[name]
                parts = arrived.setdefault(layer.name, {})
                parts[name.rpartition(".")[2]] = tensor
                del tensor  # one layer at a time
                if len(parts) == len(layer.shapes):
                    given = arrived.pop(layer.name).items()
                    weights = {leaf: part.to(device) for leaf, part in given}
                    made = nn.functional.linear(activated.to(weights["weight"].dtype), **weights)
                    rows[: len(made), layer.start : layer.stop].copy_(made)
                    del parts, given, weights, made


def find_modulation_ahead(transformer: nn.Module) -> ModulationAhead | None:
    """Return what computes the transformer's modulations ahead; None if its layers are resident."""
    found = getattr(transformer, ATTRIBUTE, None)
    assert found is None or isinstance(found, ModulationAhead)
    return found


def take_layers(family: Family, transformer: nn.Module) -> ModulationAhead:
    """Replace the modulation layers; `connect` must follow before the transformer runs."""
    assert family.modulation is not None
    layers: list[ModulationLayer] = []
    for activation, name in family.modulation.find(transformer):
        layer, start = transformer.get_submodule(name), layers[-1].stop if layers else 0
        assert isinstance(layer, nn.Linear)
        shapes = {leaf: each.detach().to("meta") for leaf, each in layer.named_parameters()}
        layers.append(ModulationLayer(name, shapes, start, start + layer.out_features))
        transformer.set_submodule(name, ModulationPart(layers[-1].start, layers[-1].stop))
        transformer.set_submodule(activation, nn.Identity())
    ahead = ModulationAhead(layers, len(family.modulation.embedders))
    transformer.add_module(ATTRIBUTE, ahead)
    for number, embedder in enumerate(family.modulation.embedders):
        hook = partial(ahead.replace_conditioning, number)
        transformer.get_submodule(embedder).register_forward_hook(hook, with_kwargs=True)
    return ahead


def take_loaded_layers(family: Family, transformer: nn.Module) -> None:
    """Do the same to a transformer that has its weights: they are asked again from the host."""
    assert family.modulation is not None
    owned = {
        f"{name}.{leaf}": parameter.detach().cpu()
        for _, name in family.modulation.find(transformer)
        for leaf, parameter in transformer.get_submodule(name).named_parameters()
    }
    ahead = take_layers(family, transformer)

    def stream() -> Generator[tuple[str, Tensor]]:
        yield from owned.items()

    ahead.connect(stream, lambda name, _: owned[name].dtype)
