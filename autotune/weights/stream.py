"""Fill a model built without weights, tensor by tensor as they arrive, and quantize each module
once it is complete.

So loading needs the final model, the one module that is being converted, and what the loader holds;
never two copies of the model.

    model = build_empty(lambda: QwenImageTransformer2DModel(**config), dtype=torch.bfloat16)
    load_into(model, open_weights(folder / "transformer"), loader="pread", device="cuda",
    transform=quantize)
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from zlib import crc32

from autotune.errors import first_line
from autotune.system.memory import drop_mapped_pages, trim_heap
from autotune.system.process import lazy_module
from autotune.weights.files import (
    DOWNLOAD_AGAIN,
    BadWeights,
    DtypeMismatch,
    KeyMismatch,
    ShapeMismatch,
    TensorEntry,
    WeightSource,
    component_class,
    open_weights,
    read_config,
)
from autotune.weights.single_file import view_part
from autotune.weights.tensors import MappedLoader, PreadLoader, get_loader

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")

Model = TypeVar("Model", bound="nn.Module")

MAX_TENSORS = 100_000
"""Far above any model; building so many takes some seconds, and constructors build whatever
number a file says."""

MAX_COMPUTED_TENSOR_BYTES = 1 << 31
"""Limit for one tensor that a constructor computes: Stable Diffusion 3.5 Medium's table of
positions takes 1.8 GB."""
MAX_COMPUTED_BYTES = 1 << 33
"""Limit for all of them, one after the other: the same model computes 7.2 GB."""

if TYPE_CHECKING:
    DtypePolicy: TypeAlias = Callable[[str, torch.dtype], torch.dtype]
else:
    DtypePolicy = Any
"""Returns the dtype that a tensor should have in the model, from its name and its dtype as
stored."""


def attribute_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold as plain attributes, as Qwen-Image its rotary frequencies."""
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def build_empty(factory: Callable[[], Model], *, dtype: torch.dtype | None = None) -> Model:
    """Build what `factory` returns, with every parameter on the meta device and everything else
    real.

    Buffers and tensors held as plain attributes (rotary tables) are computed by constructors and
    are in no file, so they must be real from the beginning. `dtype` is the default dtype while
    building, as in `from_pretrained`.

    Unlike with `accelerate.init_empty_weights`, tied parameters stay tied. Raises BadWeights before
    a constructor computes far more than any model's does.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    previous = torch.get_default_dtype()
    handle = register_module_parameter_registration_hook(_move_to_meta)  # type: ignore[arg-type]  # torch's annotation forgets the result
    try:
        torch.set_default_dtype(dtype or previous)
        with limit_tensors(), _limit_computed():
            return factory()
    finally:
        torch.set_default_dtype(previous)
        handle.remove()


@contextmanager
def limit_tensors() -> Iterator[None]:
    """Raise BadWeights if what is built meanwhile gets over `MAX_TENSORS` parameters, whatever
    asks for them."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    numbers = count(1)

    def check(_module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        if next(numbers) > MAX_TENSORS:
            raise _too_much(f"over {MAX_TENSORS:,} tensors")

    handle = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _limit_computed() -> Any:
    """Return a mode that refuses what would compute too large tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class LimitComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        """Refuses what would compute too large tensors. Memory that `torch.empty` reserves costs
        nothing until it is written, and parameters leave it for the meta device before that."""

        _seen_bytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            writes = not (func.is_view or func is torch.ops.aten.empty.memory_format)
            if writes and kwargs.get("device") != torch.device("meta"):
                computed_bytes = _result_bytes(func, args, kwargs)
                self._seen_bytes += computed_bytes
                if (
                    computed_bytes > MAX_COMPUTED_TENSOR_BYTES
                    or self._seen_bytes > MAX_COMPUTED_BYTES
                ):
                    raise _too_much("larger tables")
            return func(*args, **kwargs)

    return LimitComputed()  # type: ignore[no-untyped-call]


def _result_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Size of the tensor that an operation on real tensors would make; 0 for others, and where
    only values decide."""
    from torch.utils._pytree import tree_map_only

    on_meta: list[bool] = []

    def as_meta(tensor: torch.Tensor) -> torch.Tensor:
        on_meta.append(tensor.is_meta)
        return tensor.to("meta")

    args, kwargs = tree_map_only(torch.Tensor, as_meta, (args, kwargs))
    if any(on_meta):
        return 0
    try:
        result = func(*args, **(kwargs if on_meta else kwargs | {"device": torch.device("meta")}))
    except (RuntimeError, NotImplementedError):  # what is wrong with it, the real call tells
        return 0
    return result.nbytes if isinstance(result, torch.Tensor) else 0


def _too_much(what: str) -> BadWeights:
    message = f"the configuration asks for {what}, more than any model has"
    return BadWeights(message, hint="use the published configuration")


def _move_to_meta(
    _module: nn.Module, _name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:  # a tied parameter must stay the same object
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def from_pretrained_dtypes(model: nn.Module, dtype: torch.dtype) -> DtypePolicy:
    """The dtypes that `from_pretrained` gives: `dtype` for floating-point tensors that the class
    does not keep in fp32.

    diffusers always keeps `_keep_in_fp32_modules`; transformers keeps those for float16 only, and
    the strict ones for bfloat16 too.
    """

    def names(attribute: str) -> set[str]:
        return set(getattr(model, attribute, None) or ())

    fp32_modules = names("_keep_in_fp32_modules")
    if hasattr(model, "_keep_in_fp32_modules_strict"):
        fp32_modules = names("_keep_in_fp32_modules_strict") | (
            fp32_modules if dtype == torch.float16 else set()
        )

    def policy(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        return torch.float32 if fp32_modules.intersection(name.split(".")) else dtype

    return policy


def cast_as_loaded(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters of a model that was not loaded the dtypes that loading gives them, in
    place.

    Buffers are left alone, as `from_pretrained` does.
    """
    policy = from_pretrained_dtypes(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(policy(name, parameter.dtype))


def transformers_renaming(model: nn.Module) -> Callable[[str], str]:
    """A function from the name of a tensor in published checkpoints to its name in a transformers
    model of today.

    It raises BadWeights for a tensor that transformers also splits, merges or transposes.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # takes seconds
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if not isinstance(step, WeightRenaming)]
    state = model.state_dict()

    def rename(name: str) -> str:
        renamed, converter = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if converter is not None:
            message = f"transformers does not only rename {name}, it converts it"
            raise BadWeights(message, hint="load this component with from_pretrained")
        return str(renamed)

    return rename


if TYPE_CHECKING:
    Transform: TypeAlias = Callable[[str, nn.Module], nn.Module | None]
else:
    Transform = Any
"""Called once with a module's qualified name and the module, as soon as all parameters and
buffers of its own have arrived. It may change the module in place, or return another one to
replace it."""

Rename = Callable[[str], str]
"""Returns the model's name of a stored tensor (`building.transformers_renaming`)."""

TRIM_EVERY_BYTES = 4 << 20
"""Bytes of converted tensors after which free memory and pages of the file are returned to the
system."""

OTHER_MODEL = (
    "are these files of the same model and component? Compare with `autotune weights inspect FILE`"
)


def load_into(
    model: nn.Module,
    source: WeightSource,
    *,
    loader: str = "safetensors",
    device: str = "cpu",
    dtype_policy: DtypePolicy | None = None,
    rename: Rename | None = None,
    transform: Transform | None = None,
) -> None:
    """Load `source` into `model`, tensor by tensor, onto `device`; the model ends in evaluation
    mode.

    Without a policy every tensor takes the dtype of its slot in the model. `rename` returns the
    model's name for a stored one (`building.transformers_renaming`). Names, shapes and kinds of
    dtype are checked from the headers before a tensor is read. After an error during reading the
    model must not be used.

    Raises:
        KeyMismatch, ShapeMismatch, DtypeMismatch: the files are of another model.
        TruncatedFile: a file shrank since its header was read.
        InvalidInput: the loader is unknown or cannot be used on this machine.
    """
    target = torch.device(device)
    loader = _loader_for(source, loader)
    stream_from = get_loader(loader, target).stream
    slots = _find_slots(model)
    names = _check_match(model, slots, source, rename)
    converted: list[Tensor] = []
    converted_bytes = 0
    filler = _Filler(model, slots, transform)
    with closing(stream_from(source, target)) as stream:
        for stored, tensor in stream:
            name = names[stored]
            if name in filler.by_name:
                slot = filler.by_name[name]
                dtype = dtype_policy(name, tensor.dtype) if dtype_policy else slot.tensor.dtype
                filler.fill(slot, tensor.to(dtype))
                if transform or dtype != tensor.dtype or target.type != "cpu":
                    converted_bytes += tensor.nbytes
                    if (
                        loader == MappedLoader.name
                        and target.type == "cpu"
                        and source.is_mapped(stored)
                    ):
                        converted.append(tensor)  # which holds no memory: its pages are the file's
            del tensor  # or its memory would be held while the next one is read
            if converted_bytes >= TRIM_EVERY_BYTES:
                _return_memory(converted)
                converted_bytes = 0
    filler.finish(target)
    if converted_bytes or transform:
        _return_memory(converted)


def check_source(model: nn.Module, source: WeightSource, rename: Rename | None = None) -> None:
    """Check names, shapes and kinds of dtype of all weights of `model` from the headers, and read
    nothing.

    `rename` as for `load_into`.

    Raises:
        KeyMismatch, ShapeMismatch, DtypeMismatch: the files are of another model.
    """
    _check_match(model, _find_slots(model), source, rename)


def stream_tensors(
    source: WeightSource, *, loader: str, device: torch.device, dtype_policy: DtypePolicy
) -> Generator[tuple[str, Tensor]]:
    """Yield every tensor of `source` by name, on `device`, in the policy's dtype, for weights that
    no model keeps.

    Hardly more than one is in memory, unless the caller keeps them.
    """
    loader = _loader_for(source, loader)
    with closing(get_loader(loader, device).stream(source, device)) as stream:
        for name, tensor in stream:
            yield name, tensor.to(dtype_policy(name, tensor.dtype))
            if loader == MappedLoader.name and source.is_mapped(name):
                drop_mapped_pages(tensor)


def _loader_for(source: WeightSource, loader: str) -> str:
    """The loader that is asked for, if it can read the source."""
    return PreadLoader.name if source.is_view and loader != MappedLoader.name else loader


def _return_memory(converted: list[Tensor]) -> None:
    """Return to the system what nothing needs any more, the mapped pages of `converted` too;
    empties the list."""
    trim_heap()
    for tensor in converted:
        drop_mapped_pages(tensor)
    converted.clear()


def fill_random(
    model: nn.Module,
    *,
    device: str = "cpu",
    seed: int,
    dtype_policy: DtypePolicy | None = None,
    transform: Transform | None = None,
) -> None:
    """Fill a model built by `build_empty` with random weights, streamed like `load_into`: for
    trials without the files.

    Matrices are uniform with variance 1 / fan-in, so that activations stay in scale; vectors called
    `weight` are ones (norms), other vectors zeros (biases). A tensor's values depend on the seed
    and its name alone.
    """
    target = torch.device(device)
    slots = _find_slots(model)
    filler = _Filler(model, slots, transform)
    for slot in slots:
        dtype = dtype_policy(slot.name, slot.tensor.dtype) if dtype_policy else slot.tensor.dtype
        is_known = slot.is_buffer and not slot.tensor.is_meta
        values = (
            slot.tensor.to(target)
            if is_known
            else draw_random(slot.name, slot.tensor, target, seed)
        )
        filler.fill(slot, values.to(dtype))
    filler.finish(target)


def draw_random(name: str, like: Tensor, device: torch.device, seed: int) -> Tensor:
    """The random values that `fill_random` gives the tensor of this name, in shape and dtype of
    `like`."""
    values = torch.zeros(like.shape, device=device, dtype=like.dtype)
    if values.ndim < 2:
        return values.fill_(1) if name.rpartition(".")[2] == "weight" else values
    generator = torch.Generator(device).manual_seed(crc32(name.encode(), seed))
    bound = (3 * values.shape[0] / max(values.numel(), 1)) ** 0.5
    return values.uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True)
class _Slot:
    """A place for one tensor in a model: one parameter or persistent buffer, under all the names
    that it has."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_buffer(self) -> bool:
        return not isinstance(self.tensor, nn.Parameter)


def _find_slots(model: nn.Module) -> tuple[_Slot, ...]:
    slots: dict[int, _Slot] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = slots.get(id(tensor))
        slots[id(tensor)] = _Slot((*known.names, name) if known else (name,), tensor)
    return tuple(slots.values())


def _find_holders(model: nn.Module, slot: _Slot) -> list[tuple[nn.Module, str]]:
    """Modules that have the slot's tensor, and its attribute name in each."""
    places = [name.rpartition(".") for name in slot.names]
    return list(dict.fromkeys((model.get_submodule(parent), leaf) for parent, _, leaf in places))


class _Filler:
    """Puts tensors into their slots and transforms each module once it is complete."""

    def __init__(
        self, model: nn.Module, slots: Sequence[_Slot], transform: Transform | None
    ) -> None:
        self.model = model
        self.transform = transform
        self.by_name = {name: slot for slot in slots for name in slot.names}
        self.filled: set[str] = set()
        self.holders = {slot.name: _find_holders(model, slot) for slot in slots}
        self.num_missing = Counter(
            module for holders in self.holders.values() for module, _ in holders
        )
        self.module_names = {module: name for name, module in model.named_modules()}

    def fill(self, slot: _Slot, tensor: Tensor) -> None:
        """Put `tensor` into its slot. A tied tensor that was stored twice is taken once."""
        if slot.name in self.filled:
            return
        self.filled.add(slot.name)
        needs_grad = slot.tensor.requires_grad and tensor.is_floating_point()
        new = tensor if slot.is_buffer else nn.Parameter(tensor, requires_grad=needs_grad)
        for module, leaf in self.holders[slot.name]:
            own: dict[str, Any] = module._buffers if slot.is_buffer else module._parameters
            own[leaf] = new
        for module, _ in self.holders[slot.name]:
            self.num_missing[module] -= 1
            if not self.num_missing[module]:
                self._complete(module)

    def _complete(self, module: nn.Module) -> None:
        name = self.module_names[module]
        replacement = self.transform(name, module) if self.transform else None
        if replacement is not None and replacement is not module and name:
            self.model.set_submodule(name, replacement)
            for tensors in (
                module._parameters,
                module._buffers,
            ):  # the slots refer to this module until the end
                tensors.update(dict.fromkeys(tensors))

    def finish(self, device: torch.device) -> None:
        """Move what is in no file, check that nothing was left without values, and return what
        quantizing took.

        CUDA's allocator would otherwise have to return it at the edge of memory, in the middle of a
        step, which looks like a spill to host memory.
        """
        for name, module in self.model.named_modules():
            for leaf in module._non_persistent_buffers_set:
                buffer = module._buffers.get(leaf)
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(device)
            for leaf, value in (
                *module._parameters.items(),
                *module._buffers.items(),
                *vars(module).items(),
            ):
                if getattr(value, "is_meta", False):
                    message = (
                        f"{name}.{leaf} has no values: it is in no file and was built on "
                        "the meta "
                        "device"
                    )
                    raise BadWeights(
                        message, hint="build the model with autotune.weights.stream.build_empty"
                    )
        self.model.eval()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _check_match(
    model: nn.Module, slots: tuple[_Slot, ...], source: WeightSource, rename: Rename | None
) -> dict[str, str]:
    """The model's name of each stored tensor. Raises KeyMismatch, ShapeMismatch or DtypeMismatch
    unless the headers are those of the model's weights."""
    names = {stored: rename(stored) if rename else stored for stored in source.locations}
    entries: dict[str, TensorEntry] = {}
    for stored, name in names.items():
        entry = source.locations[stored][1]
        if name in entries:
            raise KeyMismatch(
                f"{entries[name].name} and {stored} are both {name} in the model", hint=OTHER_MODEL
            )
        entries[name] = entry
    known = {name for slot in slots for name in slot.names}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in entries
        if name not in known and not any(re.search(p, name) for p in ignored)
    ]
    missing = [slot.name for slot in slots if not entries.keys() & set(slot.names)]
    for keys, problem in ((missing, "lacks"), (unexpected, "has, but the model has no place for,")):
        if keys:
            shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise KeyMismatch(f"{source.path} {problem} {shown}", hint=OTHER_MODEL)
    for slot in slots:
        for name in set(slot.names) & entries.keys():
            _check_slot(slot, name, entries[name])
    return names


def _check_slot(slot: _Slot, name: str, entry: TensorEntry) -> None:
    if entry.shape != tuple(slot.tensor.shape):
        message = (
            f"{name} has shape {entry.shape} in the file, {tuple(slot.tensor.shape)} in the model"
        )
        raise ShapeMismatch(message, hint=OTHER_MODEL)
    if entry.torch_dtype.is_floating_point != slot.tensor.dtype.is_floating_point:
        message = f"{name} is {entry.dtype} in the file, {slot.tensor.dtype} in the model"
        raise DtypeMismatch(
            message, hint="quantized files cannot be loaded; load the original and quantize it"
        )


def build_empty_component(folder: Path, name: str, *, dtype: torch.dtype) -> nn.Module:
    """Build the component without weights, from its configuration.

    Raises:
        InvalidInput: its configuration cannot be read.
        BadWeights: `model_index.json` names no class for it, or that class does not take the
            configuration.
    """
    library, class_name = component_class(folder, name)
    read_config(folder / name / "config.json")
    try:
        cls: Any = getattr(importlib.import_module(library), class_name)
        if not issubclass(cls, nn.Module):
            raise TypeError("it is no model")
        if library != "transformers":
            config, build = cls.load_config(folder / name), cls.from_config
        else:
            config, build = cls.config_class.from_pretrained(folder / name), cls
        model: nn.Module = build_empty(lambda: build(config), dtype=dtype)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        reason = first_line(error)
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            raise
        raise BadWeights(
            f"the configuration in {folder / name} does not build a {class_name}: {reason}",
            hint=DOWNLOAD_AGAIN,
        ) from error
    return model


def _open(
    folder: Path, name: str, path: Path, dtype: torch.dtype
) -> tuple[nn.Module, WeightSource, Rename | None]:
    """The empty component, its weights in a folder or a single file at `path`, and how these are
    to be renamed."""
    model, source = build_empty_component(folder, name, dtype=dtype), open_weights(path)
    if path.is_file() and path.suffix == ".safetensors":
        source = view_part(source, name, model)
    library, _ = component_class(folder, name)
    return model, source, transformers_renaming(model) if library == "transformers" else None


def check_part(folder: Path, name: str, path: Path) -> WeightSource:
    """The weights of `folder`'s component `name` in a file or folder elsewhere, under the names
    that are stored there.

    Raises InvalidInput or BadWeights as `load_component`.
    """
    model, source, rename = _open(folder, name, path, torch.float32)
    check_source(model, source, rename)
    return source


def load_component(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    loader: str = "safetensors",
    transform: Callable[[nn.Module], Transform | None] = lambda model: None,
    weights: Path | None = None,
    casts: bool = True,
) -> Any:
    """Load what `from_pretrained` returns for `folder/name`, streamed onto `device`.

    `weights` is a file or folder that has the weights, if `folder/name` has the configuration
    alone. `transform` gets the empty model and returns what to do with each module as it arrives.
    Without `casts` weights stay as they are stored.

    Raises InvalidInput or BadWeights as `build_empty_component`, and for weights that are absent,
    damaged or of another model.
    """
    model, source, rename = _open(folder, name, weights or folder / name, dtype)
    policy: DtypePolicy = (
        from_pretrained_dtypes(model, dtype) if casts else lambda name, stored: stored
    )
    load_into(
        model,
        source,
        loader=loader,
        device=device,
        dtype_policy=policy,
        rename=rename,
        transform=transform(model),
    )
    return model
