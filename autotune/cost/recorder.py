"""A dispatch mode that watches one pass: live bytes after every operation, and the work done.

Nothing is computed: tensors are on the meta device, so a pass of a 20-billion-parameter model takes
a fraction of a second. Live bytes are exact, because the recorder follows storages (not tensors:
views share one) from the operation that makes them until Python and autograd let go of them.
"""

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autotune.cost import allocator, kernels

MATMULS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm"})
PRODUCTS = {"_int_mm": "int8", "_scaled_mm": "fp8"}  # those with factors of 8 bits, and the dtype
# What starts no kernel, beside operations whose schema says that they return a view.
FREE = frozenset(
    {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias", "empty", "empty_like"}
)
# Dtypes that only quantized weights have.
STORED = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn})

# Functions between an operation and this module's look at it.
OWN_FRAMES = frozenset({"_sums_gradients", "__torch_dispatch__", "_fn", "inner"})

SCRATCH = 0  # storage number of kernel scratch memory, which lives within one operation


@dataclass
class Segment:
    """One stretch of a pass, as a block's forward pass; bytes are relative to its start."""

    name: str
    growth_bytes: int = 0  # live at the end minus live at the start
    peak_bytes: int = 0  # highest level inside
    workspace_bytes: int = 0  # kernel scratch memory within that peak
    work: Counter[kernels.Work] = field(default_factory=Counter)
    # (storage number, bytes) of an allocation; negative bytes of a free.
    events: list[tuple[int, int]] = field(default_factory=list)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records segments between calls of `mark`."""

    def __init__(self, rules: kernels.DeviceRules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.granularity = allocator.BLOCK_BYTES if rules == "cuda" else 1
        self.counts_host = rules == "cpu"
        self.segments: list[Segment] = []
        self._live: dict[int, weakref.ref[Any]] = {}
        self._numbers = 0
        self._summed: tuple[int, int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # its wrapper would add a tenth to an operation's time
        return False

    def seed(self, tensors: Iterable[Tensor]) -> int:
        """Count `tensors` and their views as live from before the pass; return new bytes."""
        return sum(self._watch(tensor, None) for tensor in tensors)

    def mark(self, name: str) -> None:
        self.segments.append(Segment(name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types):
            # A quantized weight: let it say which plain operations it is made of.
            return NotImplemented
        kwargs = kwargs or {}
        inputs = tensors_in(args)
        for tensor in inputs:  # what nobody seeded before: plain attributes and caches of modules
            if tensor.untyped_storage()._cdata not in self._live:
                self._watch(tensor, None)
        args = on_meta(args, inputs)
        if func.is_view:
            self._summed = None
            return func(*args, **kwargs)
        known = remembered_call(func, args, kwargs)
        out = called(func, args, kwargs, known)
        segment = self.segments[-1]
        outputs = tensors_in((out,))
        fresh = sum([self._watch(tensor, segment) for tensor in outputs])
        name = name_of(func)
        sums = name == "add" and _sums_gradients(inputs)
        storage = inputs[0].untyped_storage()._cdata if sums else 0
        self._summed = (storage, len(segment.events)) if sums else None
        if self.counts_host and (scratch := kernels.conversion_bytes(func, inputs)):
            self._allocate(segment, scratch)()
        if name != "empty" and (fresh or name not in FREE):
            charge = known.charge if known else None
            charge = charge or _charge_of(func, args, kwargs, out, inputs, outputs)
            if known:
                known.charge = charge
            work, scratch = charge
            if scratch:
                segment.events.extend([(SCRATCH, scratch), (SCRATCH, -scratch)])
            segment.work[work] += 1
        return out

    def take_briefly(self, num_bytes: int) -> None:
        """Count memory that is taken and given back, as by operations that are not traced."""
        self._allocate(self.segments[-1], num_bytes)()

    def _watch(self, tensor: Tensor, segment: Segment | None) -> int:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key in self._live or (tensor.device.type != "meta" and not self.counts_host):
            return 0
        size = storage.nbytes()
        free = self._allocate(segment, size) if segment is not None else None

        def forget(_: Any) -> None:
            self._live.pop(key, None)
            if free is not None:
                free()
                self._sum_in_place(key)

        self._live[key] = weakref.ref(storage, forget)
        return size

    def _sum_in_place(self, freed: int) -> None:
        """Autograd sums in place of the first of two gradients, but not under a dispatch mode."""
        events = self.segments[-1].events
        if self._summed == (freed, len(events) - 1):
            events[-2], events[-1] = events[-1], events[-2]

    def _allocate(self, segment: Segment, size: int) -> Callable[[], None]:
        rounded = -(-size // self.granularity) * self.granularity
        self._numbers += 1
        number = self._numbers
        segment.events.append((number, rounded))

        def free() -> None:
            self.segments[-1].events.append((number, -rounded))

        return free


def _charge_of(
    func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[kernels.Work, int]:
    name = name_of(func)
    moved = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    kind, shape = _class_of(name, inputs)
    scratch = 0
    if kind.startswith("attention"):
        backward = kind == "attention.backward"
        flops = math.prod(shape) * (10 if backward else 4)  # 5 and 2 products, 2 FLOPs each
        scratch = kernels.workspace_bytes(name, inputs[1 if backward else 0].shape)
    elif kind.startswith("matmul"):
        flops = 2 * math.prod(shape)
    else:
        scales = [torch.int32] == [tensor.dtype for tensor in inputs]  # sums of int8
        if kind == "elementwise" and (scales or any(each.dtype in STORED for each in outputs)):
            kind = "elementwise.quantize"
        formula = flop_registry.get(func.overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
    return (kind, shape, flops, moved), scratch


def _sums_gradients(inputs: list[Tensor]) -> bool:
    """Autograd's own addition of two gradients, if the first has room: called by no Python code."""
    if torch.is_grad_enabled() or inputs[0].untyped_storage().nbytes() != inputs[0].nbytes:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name in OWN_FRAMES:
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__


def _class_of(name: str, inputs: list[Tensor]) -> tuple[str, tuple[int, ...]]:
    if name in MATMULS:
        left, right = inputs[-2], inputs[-1]
        batch = left.shape[0] if left.ndim == 3 else 1
        return "matmul", (batch * left.shape[-2], left.shape[-1], right.shape[-1])
    if name in PRODUCTS:
        left, right = inputs[:2]
        return f"matmul.{PRODUCTS[name]}", (*left.shape, right.shape[1])
    if "attention" in name:
        backward = name.endswith("backward")
        query, key = inputs[1:3] if backward else inputs[0:2]
        shape = (*query.shape[:3], key.shape[2], query.shape[3])
        return ("attention.backward" if backward else "attention"), tuple(shape)
    if name.startswith("convolution"):
        return "convolution", ()
    if stored := [tensor.dtype for tensor in inputs if tensor.dtype in STORED]:
        return f"dequantization.{str(stored[0]).removeprefix('torch.')}", ()
    kernel = "narrow" if _is_narrow(name, inputs) else name
    return (f"elementwise.{kernel}" if kernel in kernels.SLOW_ON_CPU else "elementwise"), ()


def _is_narrow(name: str, inputs: list[Tensor]) -> bool:
    whole = [tensor for tensor in inputs if tensor.ndim > 1]
    if not whole or max(tensor.shape[-1] for tensor in whole) > kernels.NARROW:
        return False
    return name == "sum" or any(t.shape != whole[0].shape or not t.is_contiguous() for t in whole)


def summarize(segments: Iterable[Segment]) -> None:
    """Fill in growth and peak of each segment from its events."""
    for segment in segments:
        level = peak = scratch = 0
        for number, size in segment.events:
            level += size
            if level > peak:
                peak, scratch = level, size if number == SCRATCH else 0
        segment.growth_bytes, segment.peak_bytes, segment.workspace_bytes = level, peak, scratch


# An operation on these can be remembered; subclasses are quantized weights.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

META = torch.device("meta")
_Result = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class RememberedCall:
    """Results of a function called with arguments of certain shapes."""

    # Tensors' shape, strides and dtype; empty if it wrote into an argument, None if unknown.
    results: tuple[_Result | int | None, ...] | None = None
    charge: Any = None  # whatever else follows from the key, for who records


_known: dict[Hashable, RememberedCall] = {}
_kinds: dict[int, str] = {}
_names: dict[int, str] = {}
MAX_KNOWN = 20_000  # more than ten workloads' worth; then all are forgotten


def kind_of(func: Any) -> str:
    """Tell what `func` gives: something "new", what it wrote ("in place" or "out"), or a "view"."""
    # Overloads live as long as the process, and hashing one takes a call.
    if id(func) not in _kinds:
        _kinds[id(func)] = _find_kind(func)
    return _kinds[id(func)]


def name_of(func: Any) -> str:
    """Name an operation without `aten::`, which takes torch longer to tell."""
    if id(func) not in _names:
        _names[id(func)] = func._schema.name[6:]
    return _names[id(func)]


def remembered_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RememberedCall | None:
    """Find what is remembered of such a call; None if `key_of` cannot tell it from others."""
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
    """Call `func`, or make empty meta tensors of the shapes that `known` says."""
    if known is None:
        return func(*args, **kwargs)
    kind = kind_of(func)
    written = args[0] if kind == "in place" else kwargs["out"] if kind == "out" else None
    if known.results is not None:
        if written is not None:
            return written
        made = [
            torch.empty_strided(each[0], each[1], dtype=each[2], device=META)
            if isinstance(each, tuple)
            else each
            for each in known.results
        ]
        return made[0] if len(made) == 1 else tuple(made)
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
    """Calls operations on plain meta tensors by what is remembered of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `recorder.Recorder`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types):
            return NotImplemented  # as in `Recorder`
        args, kwargs = on_meta(args, tensors_in(args)), kwargs or {}
        return called(func, args, kwargs, remembered_call(func, args, kwargs))


def on_meta(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Move arguments to the meta device if any is there: some models read numbers on the host."""
    places = {tensor.device.type for tensor in tensors if tensor.ndim}
    return _to_meta(args) if len(places) > 1 else args


def _to_meta(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to("meta") if item.ndim else item
    return type(item)(map(_to_meta, item)) if isinstance(item, list | tuple) else item


def tensors_in(items: Iterable[Any]) -> list[torch.Tensor]:
    """List tensors among `items` and within lists and tuples of them, as `cat` takes."""
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
    writes = all(alias.is_write for alias in aliases)
    if not alone or not writes or torch.Tag.inplace_view in func.tags:
        return "view"
    written = next(argument for argument in arguments if argument.alias_info)
    return "in place" if written is arguments[0] else "out" if written.name == "out" else "view"


def _fresh(item: Any, args: tuple[Any, ...]) -> bool:
    if type(item) is not torch.Tensor or item.device.type != "meta" or item.storage_offset():
        return False
    storage = item.untyped_storage()
    inputs = (tensor.untyped_storage()._cdata for tensor in tensors_in(args))
    strides = zip(item.shape, item.stride(), strict=True)
    dense = 1 + sum((size - 1) * stride for size, stride in strides)
    return storage.nbytes() == dense * item.element_size() and storage._cdata not in inputs


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return what decides the result; None for views, and with numbers in tensors."""
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
                plain = [tuple(part) if isinstance(part, list) else part for part in item]
                parts.append(tuple(zip(map(type, item), plain, strict=True)))
            elif len(tensors) < len(item) or any(
                not part.is_meta or part.ndim == 0 for part in tensors
            ):
                return None
            else:
                parts.append(tuple((part.dtype, part.shape, part.stride()) for part in tensors))
        else:
            parts.append((type(item), item))
    return tuple(parts)
