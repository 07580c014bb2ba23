"""Give a model built without weights its tensors, one by one as they arrive, and quantize each module when it is whole.

So loading needs the final model, the one module that is being converted, and what the loader reads ahead; never two
copies of the model.

    model = build_empty(lambda: QwenImageTransformer2DModel(**config), dtype=torch.bfloat16)
    load_into(model, open_source(folder / "transformer"), loader="pread", device="cuda", transform=quantize)
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from autotune.weights.building import DtypePolicy
from autotune.weights.errors import BadWeights, DtypeMismatch, KeyMismatch, ShapeMismatch
from autotune.weights.files import TensorEntry
from autotune.weights.loaders import loader_called
from autotune.weights.sources import WeightSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Transform = Callable[[str, "nn.Module"], "nn.Module | None"]
"""Called once with a module's qualified name and the module, as soon as all parameters and buffers of its own have
arrived. It may change the module in place, or return another to put in its place."""

TRIM_EVERY_BYTES = 4 << 20
"""Of tensors loaded, until memory that is free is given back."""

OTHER_MODEL = "are these files of the same model and component? Compare with `autotune weights inspect FILE`"


def load_into(
    model: "nn.Module",
    source: WeightSource,
    *,
    loader: str = "safetensors",
    device: str = "cpu",
    dtype_policy: DtypePolicy | None = None,
    rename: Callable[[str], str] | None = None,
    transform: Transform | None = None,
) -> None:
    """Load `source` into `model`, tensor by tensor, onto `device`; the model ends in evaluation mode.

    Without a policy every tensor takes the dtype of its place in the model. `rename` gives the model's name for a
    stored one (`building.names_in_transformers`). Names, shapes and kinds of dtype are checked from the headers before
    a tensor is read. After an error during reading the model must not be used.

    Raises:
        KeyMismatch, ShapeMismatch, DtypeMismatch: the files are of another model.
        TruncatedFile: a file shrank since its header was read.
        InvalidInput: the loader is unknown or cannot be used here.
    """
    import torch

    target = torch.device(device)
    chosen = loader_called(loader, target)
    slots = _slots(model)
    names = {stored: rename(stored) if rename else stored for stored in source.places}
    _check(model, slots, source, names)
    freed = 0
    arrivals = _Arrivals(model, slots, transform)
    with closing(chosen.stream(source, target)) as stream:
        for stored, tensor in stream:
            name = names[stored]
            if name in arrivals.by_name:
                slot = arrivals.by_name[name]
                wanted = dtype_policy(name, tensor.dtype) if dtype_policy else slot.dtype
                arrivals.accept(slot, tensor.to(wanted))
                freed += tensor.nbytes if transform or wanted != tensor.dtype or target.type != "cpu" else 0
            del tensor  # or its memory would be held while the next one is read
            if freed >= TRIM_EVERY_BYTES:
                _return_freed_memory()
                freed = 0
    arrivals.finish(target)
    if freed or transform:
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Have glibc give free pages back to the system, which it keeps where a small allocation lies behind them.

    Without it the heap grew to several times the model while quantizing. A no-op on other C libraries. See
    malloc_trim(3); a call takes about a millisecond.
    """
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def fill_random(
    model: "nn.Module",
    *,
    device: str = "cpu",
    seed: int,
    dtype_policy: DtypePolicy | None = None,
    transform: Transform | None = None,
) -> None:
    """Random weights for a model built by `build_empty`, streamed like `load_into`: for trials without the files.

    Matrices are uniform with variance 1 / fan-in, so that activations keep their scale; vectors called `weight` are
    ones (norms), other vectors zeros (biases). A tensor's values depend on the seed and its name alone.
    """
    import torch

    target = torch.device(device)
    slots = _slots(model)
    arrivals = _Arrivals(model, slots, transform)
    for slot in slots:
        dtype = dtype_policy(slot.name, slot.dtype) if dtype_policy else slot.dtype
        arrivals.accept(slot, _random(slot, target, seed).to(dtype))
    arrivals.finish(target)


def _random(slot: "_Slot", device: "torch.device", seed: int) -> "Tensor":
    import torch

    if slot.is_buffer and not slot.tensor.is_meta:
        return slot.tensor.to(device)
    values = torch.zeros(slot.tensor.shape, device=device, dtype=slot.dtype)
    if values.ndim < 2:
        return values.fill_(1) if slot.name.rpartition(".")[2] == "weight" else values
    generator = torch.Generator(device).manual_seed(crc32(slot.name.encode(), seed))
    bound = (3 * values.shape[0] / max(values.numel(), 1)) ** 0.5
    return values.uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True)
class _Slot:
    """A place for one tensor: one parameter or persistent buffer, under all the names it has."""

    names: tuple[str, ...]
    holders: tuple[tuple["nn.Module", str], ...]
    tensor: "Tensor"
    is_buffer: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dtype(self) -> "torch.dtype":
        return self.tensor.dtype


def _slots(model: "nn.Module") -> tuple[_Slot, ...]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor, is_buffer in _own_tensors(module):
            known = slots.get(id(tensor), _Slot((), (), tensor, is_buffer))
            names = (*known.names, f"{prefix}.{leaf}" if prefix else leaf)
            holders = known.holders if (module, leaf) in known.holders else (*known.holders, (module, leaf))
            slots[id(tensor)] = _Slot(names, holders, tensor, is_buffer)
    return tuple(slots.values())


def _own_tensors(module: "nn.Module") -> Iterator[tuple[str, "Tensor", bool]]:
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield leaf, parameter, False
    for leaf, buffer in module._buffers.items():
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer, True


class _Arrivals:
    """Puts tensors in their places and knows when a module is whole."""

    def __init__(self, model: "nn.Module", slots: Iterable[_Slot], transform: Transform | None) -> None:
        self.model = model
        self.transform = transform
        self.by_name = {name: slot for slot in slots for name in slot.names}
        self.filled: set[str] = set()
        self.missing: dict[nn.Module, int] = {}
        for slot in slots:
            for module, _ in slot.holders:
                self.missing[module] = self.missing.get(module, 0) + 1
        self.module_names = {module: name for name, module in model.named_modules()}

    def accept(self, slot: _Slot, tensor: "Tensor") -> None:
        """Put `tensor` in its place. A tied tensor that was stored twice is taken once."""
        from torch import nn

        if slot.name in self.filled:
            return
        self.filled.add(slot.name)
        new = tensor if slot.is_buffer else nn.Parameter(tensor, requires_grad=_may_learn(slot, tensor))
        for module, leaf in slot.holders:
            places: dict[str, Any] = module._buffers if slot.is_buffer else module._parameters
            places[leaf] = new
        for module, _ in slot.holders:
            self.missing[module] -= 1
            if not self.missing[module]:
                self._whole(module)

    def _whole(self, module: "nn.Module") -> None:
        name = self.module_names[module]
        replacement = self.transform(name, module) if self.transform else None
        if replacement is not None and replacement is not module and name:
            parent, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, replacement)
            for tensors in (module._parameters, module._buffers):  # the slots know this module until all have come
                tensors.update(dict.fromkeys(tensors))

    def finish(self, device: "torch.device") -> None:
        """Move what is in no file, make sure that nothing was left without values, and give back what quantizing took:
        CUDA's allocator would have to at the edge of memory, in the middle of a step, which reads as a spill."""
        import torch

        for name, module in self.model.named_modules():
            for leaf in module._non_persistent_buffers_set:
                buffer = module._buffers.get(leaf)
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(device)
            for leaf, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
                if _is_meta(value):
                    message = f"{name}.{leaf} has no values: it is in no file and was built on the meta device"
                    raise BadWeights(message, hint="build the model with autotune.weights.building.build_empty")
        self.model.eval()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _may_learn(slot: _Slot, tensor: "Tensor") -> bool:
    return slot.tensor.requires_grad and tensor.is_floating_point()


def _is_meta(value: Any) -> bool:
    return bool(getattr(value, "is_meta", False))


def _check(model: "nn.Module", slots: tuple[_Slot, ...], source: WeightSource, names: Mapping[str, str]) -> None:
    entries: dict[str, TensorEntry] = {}
    for stored, name in names.items():
        entry = source.places[stored][1]
        if name in entries:
            raise KeyMismatch(f"{entries[name].name} and {stored} are both {name} in the model", hint=OTHER_MODEL)
        entries[name] = entry
    known = {name for slot in slots for name in slot.names}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    extra = [name for name in entries if name not in known and not any(re.search(p, name) for p in ignored)]
    missing = [slot.name for slot in slots if not entries.keys() & set(slot.names)]
    for absent, what in ((missing, "lacks"), (extra, "has, but the model has no place for,")):
        if absent:
            shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
            raise KeyMismatch(f"{source.path} {what} {shown}", hint=OTHER_MODEL)
    for slot in slots:
        for name in set(slot.names) & entries.keys():
            _check_kind(slot, name, entries[name])


def _check_kind(slot: _Slot, name: str, entry: TensorEntry) -> None:
    if entry.shape != tuple(slot.tensor.shape):
        message = f"{name} has shape {entry.shape} in the file, {tuple(slot.tensor.shape)} in the model"
        raise ShapeMismatch(message, hint=OTHER_MODEL)
    if entry.torch_dtype.is_floating_point != slot.dtype.is_floating_point:
        message = f"{name} is {entry.dtype} in the file, {slot.dtype} in the model"
        raise DtypeMismatch(message, hint="quantized files cannot be loaded; load the original and quantize it")
