"""Run operations on meta tensors, remembering the shapes of results: most of a trace's time would go to finding them.

torch works out the result of an elementwise operation on the meta device in Python, in some 0.2 ms. Blocks, micro-batch
sizes and storages repeat the same few hundred calls thousands of times, so each is worked out once.
"""

from collections.abc import Hashable
from typing import Any

import torch

_known: dict[Hashable, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]] = {}
"""(shape, strides, dtype) of each tensor in the result, by function and what it was called with."""
_functional: dict[Any, bool] = {}
MOST_KNOWN = 20_000  # more than ten workloads' worth; then all are forgotten


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, or empty meta tensors of the shapes that it is known to give."""
    if func not in _functional:
        schema = func._schema
        _functional[func] = not any(item.alias_info for item in (*schema.arguments, *schema.returns))
    key = _key_of(func, args, kwargs) if _functional[func] else None
    if key is None:
        return func(*args, **kwargs)
    if key in _known:
        made = tuple(
            torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in _known[key]
        )
        return made if len(func._schema.returns) > 1 else made[0]
    out = func(*args, **kwargs)
    results = out if isinstance(out, tuple) else (out,)
    if all(_fresh(item, args) for item in results):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = tuple((item.shape, item.stride(), item.dtype) for item in results)
    return out


def _fresh(item: Any, args: tuple[Any, ...]) -> bool:
    """Whether `item` is a whole new meta tensor, so that an empty one may stand for it."""
    if type(item) is not torch.Tensor or item.device.type != "meta" or item.storage_offset():
        return False
    storage = item.untyped_storage()
    inputs = (arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor))
    dense = 1 + sum((size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True))
    return storage.nbytes() == dense * item.element_size() and storage._cdata not in inputs


def _key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What decides the result; None where that is not known for certain, as with numbers in tensors."""
    parts: list[Hashable] = [func]
    for item in (*args, *kwargs.items()):
        if isinstance(item, torch.Tensor):
            if item.device.type != "meta" or item.ndim == 0:
                return None
            parts.append((item.dtype, item.shape, item.stride()))
        elif isinstance(item, list | tuple):
            if any(isinstance(part, torch.Tensor) for part in item):
                return None
            parts.append(tuple((type(part), tuple(part) if isinstance(part, list) else part) for part in item))
        else:
            parts.append((type(item), item))
    return tuple(parts)
