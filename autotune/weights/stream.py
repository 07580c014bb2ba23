"""Fill a model built without weights by tensors, and quantize each module once it is complete.

So loading needs the final model, the one module that is being converted, and what the loader holds;
never two copies of the model.

    model = build_empty(lambda: QwenImageTransformer2DModel(**config), dtype=torch.bfloat16)
    load_into(model, open_weights(folder / "transformer"), loader="pread", transform=quantize)
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from autotune.system.memory import drop_mapped_pages, trim_heap
from autotune.weights import empty, files, single_file
from autotune.weights.tensors import MappedLoader, PreadLoader, get_loader

DtypePolicy = Callable[[str, torch.dtype], torch.dtype]  # from a tensor's name and stored dtype
# Called with a module's name and it as soon as all tensors of its own have arrived. It may change
# the module in place, or return another one to replace it.
Transform = Callable[[str, nn.Module], nn.Module | None]
Rename = Callable[[str], str]

TRIM_EVERY_BYTES = 4 << 20  # converted, before free memory and mapped pages are returned

OTHER_MODEL = (
    "are these files of the same model and component? Compare with `autotune weights inspect FILE`"
)


def attribute_tensors(model: nn.Module) -> list[torch.Tensor]:
    """List tensors that modules hold as plain attributes, as Qwen-Image its rotary frequencies."""
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def from_pretrained_dtypes(model: nn.Module, dtype: torch.dtype) -> DtypePolicy:
    """Give the dtypes of `from_pretrained`: `dtype` unless the class keeps a module in fp32.
    diffusers always keeps `_keep_in_fp32_modules`; transformers keeps those for float16 only, and
    the strict ones for bfloat16 too."""
    fp32_modules = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if hasattr(model, "_keep_in_fp32_modules_strict"):
        strict = set(model._keep_in_fp32_modules_strict or ())  # type: ignore[arg-type]
        fp32_modules = strict | fp32_modules if dtype == torch.float16 else strict

    def policy(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        return torch.float32 if fp32_modules.intersection(name.split(".")) else dtype

    return policy


def cast_as_loaded(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all that files hold, buffers too, the dtypes that loading gives it, in place."""
    policy = from_pretrained_dtypes(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(policy(name, tensor.dtype))


def transformers_renaming(model: nn.Module) -> Rename:
    """Map names in published checkpoints to today's; BadWeights if more than names would change."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # takes seconds
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if not isinstance(step, WeightRenaming)]
    known = renamings, converters, model.base_model_prefix, model.state_dict()

    def rename(name: str) -> str:
        renamed, converter = rename_source_key(name, *known)
        if converter is not None:
            message = f"transformers does not only rename {name}, it converts it"
            raise files.BadWeights(message, hint="load this component with from_pretrained")
        return str(renamed)

    return rename


def load_into(
    model: nn.Module,
    source: files.WeightSource,
    *,
    loader: str = "safetensors",
    device: str = "cpu",
    dtype_policy: DtypePolicy | None = None,
    rename: Rename | None = None,
    transform: Transform | None = None,
) -> None:
    """Load `source` into `model`, tensor by tensor, onto `device`, and set evaluation mode.

    Without a policy every tensor takes the dtype of its slot. Headers are checked before a tensor
    is read. Raises ModelMismatch for files of another model, InvalidInput for a loader that cannot
    be used, TruncatedFile for a file that shrank; then the model must not be used.
    """
    target = torch.device(device)
    loader = _loader_for(source, loader)
    is_mapped = loader == MappedLoader.name and target.type == "cpu"
    stream_from = get_loader(loader, target).stream
    filler = _Filler(model, transform)
    names = _check_match(model, filler.slots, source, rename)
    converted: list[Tensor] = []
    converted_bytes = 0
    with closing(stream_from(source, target)) as stream:
        for stored, tensor in stream:
            name = names[stored]
            if name in filler.by_name:
                slot = filler.by_name[name]
                dtype = dtype_policy(name, tensor.dtype) if dtype_policy else slot.tensor.dtype
                filler.fill(slot, tensor.to(dtype))
                if transform or dtype != tensor.dtype or target.type != "cpu":
                    converted_bytes += tensor.nbytes
                    if is_mapped and source.locations[stored][1].is_mappable:
                        converted.append(tensor)  # which holds no memory: its pages are the file's
            del tensor  # or its memory would be held while the next one is read
            if converted_bytes >= TRIM_EVERY_BYTES:
                _return_memory(converted)
                converted_bytes = 0
    filler.finish(target)
    if converted_bytes or transform:
        _return_memory(converted)


def check_source(
    model: nn.Module, source: files.WeightSource, rename: Rename | None = None
) -> None:
    """Check names, shapes and kinds of dtype from the headers. Raises ModelMismatch."""
    _check_match(model, _find_slots(model), source, rename)


def stream_tensors(
    source: files.WeightSource, *, loader: str, device: torch.device, dtype_policy: DtypePolicy
) -> Generator[tuple[str, Tensor]]:
    """Yield tensors by name, in the dtype of the policy, about one in memory at a time."""
    loader = _loader_for(source, loader)
    with closing(get_loader(loader, device).stream(source, device)) as stream:
        for name, tensor in stream:
            yield name, tensor.to(dtype_policy(name, tensor.dtype))
            if loader == MappedLoader.name and source.locations[name][1].is_mappable:
                drop_mapped_pages(tensor)


def _loader_for(source: files.WeightSource, loader: str) -> str:
    return PreadLoader.name if source.is_view and loader != MappedLoader.name else loader


def _return_memory(converted: list[Tensor]) -> None:
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
    """Fill a model of `build_empty` with random weights, as `load_into`, for trials without files.

    Matrices are uniform with variance 1 / fan-in, so that activations stay in scale; vectors called
    `weight` are ones (norms), others zeros. Values depend on the seed and the tensor's name alone.
    """
    target = torch.device(device)
    filler = _Filler(model, transform)
    for slot in filler.slots:
        dtype = dtype_policy(slot.name, slot.tensor.dtype) if dtype_policy else slot.tensor.dtype
        if slot.is_buffer and not slot.tensor.is_meta:
            values = slot.tensor.to(target)
        else:
            values = draw_random(slot.name, slot.tensor, target, seed)
        filler.fill(slot, values.to(dtype))
    filler.finish(target)


def draw_random(name: str, like: Tensor, device: torch.device, seed: int) -> Tensor:
    """Draw the values that `fill_random` gives this name, in shape and dtype of `like`."""
    values = torch.zeros(like.shape, device=device, dtype=like.dtype)
    if values.ndim < 2:
        return values.fill_(1) if name.rpartition(".")[2] == "weight" else values
    generator = torch.Generator(device).manual_seed(crc32(name.encode(), seed))
    bound = (3 * values.shape[0] / max(values.numel(), 1)) ** 0.5
    return values.uniform_(-bound, bound, generator=generator)


class _Slot:
    def __init__(self, tensor: Tensor, names: list[str]) -> None:
        self.tensor = tensor
        self.names = names
        self.name = names[0]
        self.is_buffer = not isinstance(tensor, nn.Parameter)


def _find_slots(model: nn.Module) -> list[_Slot]:
    tensors = model.state_dict(keep_vars=True)
    names = defaultdict(list)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    return [_Slot(tensors[own[0]], own) for own in names.values()]


class _Filler:
    def __init__(self, model: nn.Module, transform: Transform | None) -> None:
        self.model = model
        self.transform = transform
        self.slots = _find_slots(model)
        self.by_name = {name: slot for slot in self.slots for name in slot.names}
        self.filled: set[str] = set()
        self.holders = {slot.name: self._find_holders(slot) for slot in self.slots}
        modules = [module for holders in self.holders.values() for module, _ in holders]
        self.num_missing = Counter(modules)
        self.module_names = {module: name for name, module in model.named_modules()}

    def _find_holders(self, slot: _Slot) -> list[tuple[nn.Module, str]]:
        places = [name.rpartition(".") for name in slot.names]
        holders = [(self.model.get_submodule(parent), leaf) for parent, _, leaf in places]
        return list(dict.fromkeys(holders))

    def fill(self, slot: _Slot, tensor: Tensor) -> None:
        if slot.name in self.filled:  # tied, and stored twice
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
            # The slots refer to the old module until the end, which must not hold its tensors.
            for tensors in (module._parameters, module._buffers):
                tensors.update(dict.fromkeys(tensors))

    def finish(self, device: torch.device) -> None:
        for name, module in self.model.named_modules():
            for leaf in module._non_persistent_buffers_set:
                buffer = module._buffers.get(leaf)
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(device)
            for leaf, value in {**module._parameters, **module._buffers, **vars(module)}.items():
                if leaf in vars(module) and isinstance(value, torch.Tensor) and not value.is_meta:
                    setattr(module, leaf, value.to(device))  # or each pass would fetch it
                if getattr(value, "is_meta", False):
                    message = f"{name}.{leaf} has no values: it is in no file and was built on meta"
                    hint = "build the model with autotune.weights.empty.build_empty"
                    raise files.BadWeights(message, hint=hint)
        self.model.eval()
        if device.type == "cuda":
            # Or the allocator would return it in the middle of a step, which looks like a spill.
            torch.cuda.empty_cache()


def _check_match(
    model: nn.Module, slots: list[_Slot], source: files.WeightSource, rename: Rename | None
) -> dict[str, str]:
    names = {stored: rename(stored) if rename else stored for stored in source.locations}
    entries: dict[str, files.TensorEntry] = {}
    for stored, name in names.items():
        if name in entries:
            message = f"{entries[name].name} and {stored} are both {name} in the model"
            raise files.ModelMismatch(message, hint=OTHER_MODEL)
        entries[name] = source.locations[stored][1]
    known = {name for slot in slots for name in slot.names}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in entries
        if name not in known and not any(re.search(p, name) for p in ignored)
    ]
    missing = [slot.name for slot in slots if not entries.keys() & set(slot.names)]
    for keys, problem in ((missing, "lacks"), (unexpected, "has, unlike the model,")):
        if keys:
            shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise files.ModelMismatch(f"{source.path} {problem} {shown}", hint=OTHER_MODEL)
    for slot in slots:
        for name in set(slot.names) & entries.keys():
            _check_slot(slot.tensor, name, entries[name])
    return names


def _check_slot(tensor: Tensor, name: str, entry: files.TensorEntry) -> None:
    if entry.shape != tuple(tensor.shape):
        message = f"{name} has shape {entry.shape} in the file, {tuple(tensor.shape)} in the model"
        raise files.ModelMismatch(message, hint=OTHER_MODEL)
    if entry.torch_dtype.is_floating_point != tensor.dtype.is_floating_point:
        raise files.ModelMismatch(
            f"{name} is {entry.dtype} in the file, {tensor.dtype} in the model",
            hint="quantized files cannot be loaded; load the original and quantize it",
        )


def _open(
    folder: Path, name: str, path: Path, dtype: torch.dtype
) -> tuple[nn.Module, files.WeightSource, Rename | None]:
    model, source = empty.build_empty_component(folder, name, dtype=dtype), files.open_weights(path)
    if path.is_file() and path.suffix == ".safetensors":
        source = single_file.view_part(source, name, model)
    library, _ = files.component_class(folder, name)
    return model, source, transformers_renaming(model) if library == "transformers" else None


def check_part(folder: Path, name: str, path: Path) -> files.WeightSource:
    """Open a component's weights that lie elsewhere; errors as of `load_component`."""
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
    """Load what `from_pretrained` returns for `folder/name`, streamed onto `device`. `weights` is
    another file or folder that has them, `transform` gets the empty model and returns what to do
    with each module as it arrives, and without `casts` weights stay as they are stored."""
    model, source, rename = _open(folder, name, weights or folder / name, dtype)
    policy = from_pretrained_dtypes(model, dtype)
    load_into(
        model,
        source,
        loader=loader,
        device=device,
        dtype_policy=policy if casts else lambda name, stored: stored,
        rename=rename,
        transform=transform(model),
    )
    return model
