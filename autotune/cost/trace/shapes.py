"""Run operations on meta tensors, remembering the shapes of results: most of a trace's time would go to finding them.

torch works out the result of an elementwise operation on the meta device in Python, in some 0.2 ms. Blocks, micro-batch
sizes and storages repeat the same few hundred calls thousands of times, so each is worked out once.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors that an operation can be remembered of: no subclasses, as quantized weights are."""

_Result = tuple[torch.Size, tuple[int, ...], torch.dtype]
_known: dict[Hashable, tuple[_Result | None, ...]] = {}
"""(shape, strides, dtype) of each tensor in the result, by function and what it was called with; None for no tensor.
Of functions that write into their first argument and return it: nothing."""
_kinds: dict[Any, str] = {}
MAX_KNOWN = 20_000  # more than ten workloads' worth; then all are forgotten


def kind_of(func: Any) -> str:
    """What `func` gives: something "new", its first argument, written "in place", or a "view" or another alias."""
    if func not in _kinds:
        _kinds[func] = _find_kind(func)
    return _kinds[func]


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable | None) -> Any:
    """`func(*args, **kwargs)`, or empty meta tensors of the shapes that it is known to give; `key` is its `key_of`."""
    if key is None:
        return func(*args, **kwargs)
    kind, known = kind_of(func), _known.get(key)
    if known is not None:
        if kind == "in place":
            return args[0]
        made = tuple(each and torch.empty_strided(each[0], each[1], dtype=each[2], device="meta") for each in known)
        return made if len(func._schema.returns) > 1 else made[0]
    out = func(*args, **kwargs)
    results = () if kind == "in place" else out if isinstance(out, tuple) else (out,)
    if all(item is None or _fresh(item, args) for item in results):
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[key] = tuple(item if item is None else (item.shape, item.stride(), item.dtype) for item in results)
    return out


class Remembering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, operations on plain meta tensors are `called` by what is remembered of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `recorder.Recorder`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a quantized weight: let it say which plain operations it is made of
        args, kwargs = on_meta(args), kwargs or {}
        return called(func, args, kwargs, key_of(func, args, kwargs))


def on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose tensors are all on the meta device if any is: some models read numbers from tensors, such as
    where an image lies in a sequence, so those are on the host, and used together with the others."""
    places = {tensor.device.type for tensor in tensors_in(args) if tensor.ndim}
    return _to_meta(args) if len(places) > 1 else args


def _to_meta(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to("meta") if item.ndim else item
    return type(item)(map(_to_meta, item)) if isinstance(item, list | tuple) else item


def tensors_in(items: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among `items` and within lists and tuples of them, as `cat` and `stack` take."""
    found: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += [part for part in item if isinstance(part, torch.Tensor)]
    return found


def _find_kind(func: Any) -> str:
    arguments, returns = func._schema.arguments, func._schema.returns
    aliases = [item.alias_info for item in (*arguments, *returns) if item.alias_info]
    if not aliases:
        return "new"
    alone = len(returns) == 1 and len(aliases) == 2 and arguments[0].alias_info and returns[0].alias_info
    written = alone and all(alias.is_write for alias in aliases) and torch.Tag.inplace_view not in func.tags
    return "in place" if written else "view"


def _fresh(item: Any, args: tuple[Any, ...]) -> bool:
    """Whether `item` is a whole new meta tensor, so that an empty one may stand for it."""
    if type(item) is not torch.Tensor or item.device.type != "meta" or item.storage_offset():
        return False
    storage = item.untyped_storage()
    inputs = (tensor.untyped_storage()._cdata for tensor in tensors_in(args))
    dense = 1 + sum((size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True))
    return storage.nbytes() == dense * item.element_size() and storage._cdata not in inputs


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What decides the result; None where that is not known for certain, as with numbers in tensors, and for views."""
    if kind_of(func) == "view":
        return None
    parts: list[Hashable] = [func]
    for item in (*args, *kwargs.items()):
        if isinstance(item, torch.Tensor):
            if item.device.type != "meta" or item.ndim == 0:
                return None
            parts.append((item.dtype, item.shape, item.stride()))
        elif isinstance(item, list | tuple):
            tensors = [part for part in item if isinstance(part, torch.Tensor)]
            if not tensors:
                parts.append(tuple((type(part), tuple(part) if isinstance(part, list) else part) for part in item))
            elif len(tensors) < len(item) or any(part.device.type != "meta" or part.ndim == 0 for part in tensors):
                return None
            else:
                parts.append(tuple((part.dtype, part.shape, part.stride()) for part in tensors))
        else:
            parts.append((type(item), item))
    return tuple(parts)
