"""Run operations on meta tensors, remembering the shapes of results: most of a trace's time would
go to finding them.

torch works out the result of an elementwise operation on the meta device in Python, in some 0.2 ms.
Blocks, micro-batch sizes and storages repeat the same few hundred calls thousands of times, so each
is worked out once.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors that an operation can be remembered of: no subclasses, as quantized weights are."""

_Result = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class RememberedCall:
    """What is remembered of a function called with arguments of certain shapes."""

    results: tuple[_Result | int | None, ...] | None = None
    """(shape, strides, dtype) of each tensor in the result, and what is none. None: not known,
    so it is called again. Of functions that write into an argument and return it: nothing."""
    charge: Any = None
    """Whatever else follows from the key, for who records; None until it is found."""


_known: dict[Hashable, RememberedCall] = {}
_kinds: dict[int, str] = {}
_names: dict[int, str] = {}
MAX_KNOWN = 20_000  # more than ten workloads' worth; then all are forgotten


def kind_of(func: Any) -> str:
    """What `func` gives: something "new", what it wrote into, its first argument ("in place") or
    `out`, or a "view" or another alias."""
    kind = _kinds.get(
        id(func)
    )  # overloads live as long as the process, and hashing one takes a call
    if kind is None:
        kind = _kinds[id(func)] = _find_kind(func)
    return kind


def name_of(func: Any) -> str:
    """The name of an operation without `aten::`, which takes torch longer to tell."""
    name = _names.get(id(func))
    if name is None:
        name = _names[id(func)] = func._schema.name[6:]
    return name


def remembered_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RememberedCall | None:
    """What is remembered of such a call, nothing at first; None if no call can be told from
    others by `key_of`."""
    key = key_of(func, args, kwargs)
    if key is None:
        return None
    known = _known.get(key)
    if known is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        known = _known[key] = RememberedCall()
    return known


def called(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: RememberedCall | None
) -> Any:
    """`func(*args, **kwargs)`, or empty meta tensors of the shapes that `known`, by
    `remembered_call`, says."""
    if known is None:
        return func(*args, **kwargs)
    kind = kind_of(func)
    written = args[0] if kind == "in place" else kwargs["out"] if kind == "out" else None
    if known.results is not None:
        if written is not None:
            return written
        made = tuple(
            torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
            if isinstance(each, tuple)
            else each
            for each in known.results
        )
        return made[0] if len(made) == 1 else made
    before = None if written is None else written.shape
    out = func(*args, **kwargs)
    if written is not None:
        known.results = () if written.shape == before else None
        return out
    results = out if isinstance(out, tuple) else (out,)
    if all(item is None or type(item) is int or _fresh(item, args) for item in results):
        known.results = tuple(
            (item.shape, item.stride(), item.dtype) if isinstance(item, torch.Tensor) else item
            for item in results
        )
    return out


class Remembering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, operations on plain meta tensors are `called` by what is remembered
    of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `recorder.Recorder`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            # a quantized weight: let it say which plain operations it is made of
            return NotImplemented
        args, kwargs = on_meta(args, tensors_in(args)), kwargs or {}
        return called(func, args, kwargs, remembered_call(func, args, kwargs))


def on_meta(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Arguments whose `tensors` are all on the meta device if any is: some models read numbers
    from tensors, such as where an image lies in a sequence, so those are on the host, and used
    together with the others."""
    for tensor in tensors:
        if not tensor.is_meta:
            break
    else:
        return args
    places = {tensor.device.type for tensor in tensors if tensor.ndim}
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
    alone = len(returns) == 1 and len(aliases) == 2 and returns[0].alias_info
    if (
        not alone
        or not all(alias.is_write for alias in aliases)
        or torch.Tag.inplace_view in func.tags
    ):
        return "view"
    written = next(argument for argument in arguments if argument.alias_info)
    return "in place" if written is arguments[0] else "out" if written.name == "out" else "view"


def _fresh(item: Any, args: tuple[Any, ...]) -> bool:
    """Whether `item` is a whole new meta tensor, so that an empty one may stand for it."""
    if type(item) is not torch.Tensor or item.device.type != "meta" or item.storage_offset():
        return False
    storage = item.untyped_storage()
    inputs = (tensor.untyped_storage()._cdata for tensor in tensors_in(args))
    dense = 1 + sum(
        (size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True)
    )
    return storage.nbytes() == dense * item.element_size() and storage._cdata not in inputs


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What decides the result; None where that is not known for certain, as with numbers in
    tensors, and for views."""
    if kind_of(func) == "view":
        return None
    parts: list[Hashable] = [id(func)]
    for item in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        if isinstance(item, torch.Tensor):
            if not item.is_meta or item.ndim == 0:
                return None
            parts.append((item.dtype, item.shape, item.stride()))
        elif isinstance(item, list | tuple):
            tensors = [part for part in item if isinstance(part, torch.Tensor)]
            if not tensors:
                parts.append(
                    tuple(
                        (type(part), tuple(part) if isinstance(part, list) else part)
                        for part in item
                    )
                )
            elif len(tensors) < len(item) or any(
                not part.is_meta or part.ndim == 0 for part in tensors
            ):
                return None
            else:
                parts.append(tuple((part.dtype, part.shape, part.stride()) for part in tensors))
        else:
            parts.append((type(item), item))
    return tuple(parts)
