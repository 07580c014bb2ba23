"""Trace one micro-batch's forward and backward pass of a family's real transformer without data.

The model is the real class with the real adapter, checkpointing and quantization, on the meta
device, shortened to three of each row of blocks that are alike, and all adapted or all not: the
first (whose input needs no gradient), one from the middle, and the last. `compose` repeats the
middle one to any depth.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import accumulate, groupby
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autotune.cost.kernels import DeviceRules, kernel_for, substitutes, under_autocast
from autotune.cost.recorder import Recorder, Segment, summarize
from autotune.cost.timing import MODULE_CALL, Rates, seconds_by_class
from autotune.models.family import Batch, Family, denoising_loss

N = TypeVar("N")

TRACED_BLOCKS = 3  # of each row: first, middle, last


@dataclass(frozen=True)
class TracePass:
    """One traced pass; block segments are in the order that blocks run, also those backward."""

    before: Segment  # from the noisy latents to the first block
    forward: tuple[Segment, ...]
    between: Segment  # output layers, the loss and their backward pass
    backward: tuple[Segment, ...]
    saved_bytes: int  # for the backward pass when the loss is known, the loss included


def choose_traced(
    kinds: Sequence[Sequence[Hashable]], adapted: Collection[int] | None = None
) -> tuple[tuple[tuple[int, ...], ...], list[int], list[int]]:
    """Choose the blocks that are traced: three of each row alike, and all adapted or all not.

    Returns for each list the numbers, within it, of traced blocks; for each block of the full
    model, the traced one that stands for it; and which of the traced ones are adapted.
    """
    picked: list[tuple[int, ...]] = []
    index: list[int] = []
    numbers: list[int] = []
    start = before = 0
    for own in kinds:
        of_list: list[int] = []
        keys = [
            (kind, adapted is None or start + place in adapted) for place, kind in enumerate(own)
        ]
        for (_, is_adapted), row in groupby(range(len(own)), keys.__getitem__):
            places = list(row)
            have, others = min(len(places), TRACED_BLOCKS), len(places) - TRACED_BLOCKS
            # The one before the last stands for those between.
            stand_ins = [*range(have - 1), *[have - 2] * others, have - 1]
            index += [before + at for at in stand_ins]
            numbers += range(before, before + have) if is_adapted else ()
            of_list += [*places[: have - 1], places[-1]]
            before += have
        picked.append(tuple(of_list))
        start += len(own)
    return tuple(picked), index, numbers


def block_kinds(family: Family, transformer: nn.Module) -> list[list[Hashable]]:
    """List for each list what each block is: the names and shapes of its weights."""

    def kind_of(block: nn.Module) -> Hashable:
        return tuple((name, tuple(weight.shape)) for name, weight in block.named_parameters())

    lists = family.find_block_lists(transformer).values()
    return [[kind_of(block) for block in blocks] for blocks in lists]


def shorten(family: Family, transformer: nn.Module, picked: Sequence[Sequence[int]]) -> None:
    """Leave these blocks of each list."""
    lists = family.find_block_lists(transformer).items()
    for (name, blocks), places in zip(lists, picked, strict=True):
        if len(blocks) > len(places):
            transformer.set_submodule(name, nn.ModuleList(blocks[place] for place in places))


def trace_pass(
    family: Family,
    transformer: nn.Module,
    batch: Batch,
    kernel: str,
    rules: DeviceRules,
    *,
    autocast: torch.dtype | None = None,
    train: bool = True,
    dense: bool = False,
) -> TracePass:
    """Trace a micro-batch of a transformer on the meta device, with all settings applied.

    `kernel` is named as by `kernel_for`, `dense` as by `substitutes`. Without `train` there is no
    backward pass.
    """
    recorder = Recorder(rules)
    noise = torch.empty_like(batch["latents"])
    levels = torch.empty(len(noise), device="meta")
    parameters = list(transformer.parameters())  # once: a model with an adapter takes long to walk
    recorder.seed(
        tensor for each in (*parameters, *transformer.buffers()) for tensor in stored_tensors(each)
    )
    inputs_bytes = recorder.seed([*batch.values(), noise, levels])
    recorder.mark("before")
    blocks = family.blocks(transformer)
    casting = under_autocast(autocast) if autocast else nullcontext()
    running, marking = substitutes(kernel, rules, dense=dense), _marking(blocks, recorder)
    with running, casting, recorder, marking, torch.set_grad_enabled(train):
        if train:
            loss = denoising_loss(family, transformer, batch, noise, levels)
            saved_bytes = sum(size for segment in recorder.segments for _, size in segment.events)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        else:
            saved_bytes = 0
            family.predict(transformer, noise, levels, batch)
    for parameter in parameters:
        parameter.grad = None
    summarize(recorder.segments)
    by_name = {segment.name: segment for segment in recorder.segments}
    names = range(len(blocks))
    recorder.segments[0].growth_bytes += inputs_bytes
    recorder.segments[0].peak_bytes += inputs_bytes
    return TracePass(
        before=by_name["before"],
        forward=tuple(by_name[f"forward {i}"] for i in names),
        between=by_name["between"],
        # What comes before the first adapter has no backward pass.
        backward=tuple(by_name.get(f"backward {i}", Segment("none")) for i in names if train),
        saved_bytes=saved_bytes,
    )


def trace_inference(
    call: Callable[[], object],
    module: nn.Module,
    rules: DeviceRules,
    alike: nn.Module | None = None,
) -> Segment:
    """Trace what `call` takes, on meta tensors without gradients, beyond `module`'s own bytes.

    Of calls of `alike` with equal shapes the first is traced, and the others take as much memory.
    """
    recorder = Recorder(rules)
    recorder.seed(stored_tensors(module))
    recorder.mark("all")
    kernel = kernel_for("native", rules, masked=False)
    with substitutes(kernel, rules), recorder, torch.no_grad():
        if alike is not None:
            alike.forward = _traced_once(alike.forward, recorder)
        call()
        vars(alike or module).pop("forward", None)  # the class's is left
    summarize(recorder.segments)
    return recorder.segments[0]


def _traced_once(forward: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    # Tiles and frames of a clip call a decoder hundreds of times, with a thousand operations each.
    # `feat_cache` is where Wan's keeps features of the frames before.
    def shape_of(item: Any) -> Any:
        return (item.shape, item.dtype) if isinstance(item, Tensor) else item

    def like(known: Any) -> Any:
        is_shape = isinstance(known, tuple)
        return torch.empty(known[0], dtype=known[1], device="meta") if is_shape else known

    seen: dict[Hashable, tuple[int, Any, list[Any]]] = {}

    def run(*args: Any, **options: Any) -> Any:
        cache = options.get("feat_cache") or []
        others = (value for name, value in options.items() if not name.startswith("feat_"))
        key = repr([shape_of(item) for item in (*args, *cache, *others)])
        if key in seen:
            peak_bytes, result, kept = seen[key]
            recorder.take_briefly(peak_bytes)
            out = like(result)
            for at, known in enumerate(kept):
                cache[at] = like(known)
            return out
        segment = recorder.segments[-1]
        start = len(segment.events)
        out = forward(*args, **options)
        levels = accumulate(size for _, size in segment.events[start:])
        if isinstance(out, Tensor):
            seen[key] = max(0, *levels), shape_of(out), [shape_of(item) for item in cache]
        return out

    return run


def stored_tensors(of: nn.Module | Tensor) -> Iterator[Tensor]:
    """Yield every plain tensor behind a parameter or a module: quantized ones have several."""
    for tensor in (of,) if isinstance(of, torch.Tensor) else (*of.parameters(), *of.buffers()):
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        yield from (getattr(tensor, name) for name in names) if names else (tensor,)


@contextmanager
def _marking(blocks: list[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Mark where each block's passes begin; recomputation in the backward pass marks nothing."""
    seen: set[int] = set()
    begun: set[int] = set()

    def backward_begins(index: int) -> None:
        if index not in begun:
            begun.add(index)
            recorder.mark(f"backward {index}")

    def before(index: int) -> None:
        if index not in seen:
            recorder.mark(f"forward {index}")

    def after(index: int, output: Any) -> None:
        if index in seen:
            return
        seen.add(index)
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: backward_begins(index))  # type: ignore[no-untyped-call]
        if index == len(blocks) - 1:
            recorder.mark("between")

    def call_module(*_: object) -> None:
        recorder.segments[-1].work[MODULE_CALL] += 1

    handles = [nn.modules.module.register_module_forward_pre_hook(call_module)]
    for i, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(lambda *_, i=i: before(i)))
        handles.append(block.register_forward_hook(lambda _m, _a, output, i=i: after(i, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# What a block keeps: all, the output of attention, or its input alone.
PLAIN, SELECTIVE, WHOLE = 0, 1, 2
GROWTH, PEAK, SCRATCH, SECONDS = 0, 1, 2, 3


@dataclass(frozen=True)
class PassTable:
    """A traced pass as vectors: (growth, peak, scratch) bytes, seconds by class and the host's."""

    before: NDArray[np.float64]
    forward: NDArray[np.float64]  # (blocks, columns)
    between: NDArray[np.float64]
    backward: NDArray[np.float64]  # (blocks, columns), in the order that blocks run forward

    def stretched(self, index: Sequence[int]) -> "PassTable":
        """Repeat blocks to the full model; `index` names the traced one for each."""
        index = list(index)
        backward = self.backward[index] if len(self.backward) else self.backward
        return PassTable(self.before, self.forward[index], self.between, backward)

    @property
    def seconds(self) -> NDArray[np.float64]:
        rows = np.concatenate([self.before[None], self.forward, self.between[None], self.backward])
        by_class: NDArray[np.float64] = rows[:, SECONDS:-1].sum(axis=0)
        return by_class

    def plus(self, share: float, start: "PassTable", end: "PassTable") -> "PassTable":
        """Return this table and `share` of the way from `start` to `end`."""
        rows = (
            [getattr(table, each.name) for table in (self, start, end)] for each in fields(self)
        )
        return PassTable(*(own + share * (last - first) for own, first, last in rows))


def table_of(traced: TracePass, rates: Rates, rank: int) -> PassTable:
    """Turn segments into vectors, with seconds at this machine's rates."""

    def vector(segment: Segment) -> list[float]:
        memory = (segment.growth_bytes, segment.peak_bytes, segment.workspace_bytes)
        return [*memory, *seconds_by_class(segment.work, rates, rank)]

    return PassTable(
        before=np.array(vector(traced.before)),
        forward=np.array([vector(segment) for segment in traced.forward]),
        between=np.array(vector(traced.between)),
        backward=np.array([vector(segment) for segment in traced.backward]),
    )


@dataclass(frozen=True)
class Composed(Generic[N]):
    """One micro-batch of the full model, or several: one entry or row for each in every field.

    Bytes are beyond parameters, optimizer and buffers.
    """

    peak_bytes: N
    saved_bytes: N  # live when the segment of the peak begins, gradients apart
    transient_bytes: N  # above that, kernel scratch memory apart
    workspace_bytes: N
    gradient_bytes: N  # those that exist when the segment of the peak begins
    visiting_bytes: N  # weights of swapped blocks that are on the device then
    work: NDArray[np.float64]  # seconds by class, then the host's
    forward: NDArray[np.float64]  # the share of `work` before the blocks run backward
    recompute: NDArray[np.float64]  # the share of `work` that repeats operations

    def __getitem__(self, at: int) -> "ComposedPass":
        return Composed(**{each.name: getattr(self, each.name)[at] for each in fields(self)})


ComposedPass = Composed[float]
ComposedPasses = Composed[NDArray[np.float64]]


class BlockTables:
    """Tables of a model whose blocks keep all, attention's output, and their input."""

    def __init__(
        self,
        tables: Sequence[PassTable],
        gradients: NDArray[np.float64],
        weights: NDArray[np.float64],
    ) -> None:
        """Bytes of `gradients` and `weights` are (blocks,), in the order that blocks run."""
        self.num_blocks, self.gradients, self.weights = len(gradients), gradients, weights
        # (kinds, segments in the order of the pass, columns)
        rows = [
            np.concatenate([t.before[None], t.forward, t.between[None], t.backward[::-1]])
            for t in tables
        ]
        self.rows = np.stack(rows)[:, :, :SECONDS]
        self.outside_work = np.stack([(t.before + t.between)[SECONDS:] for t in tables])
        work = np.stack([(t.forward + t.backward)[:, SECONDS:] for t in tables])
        again = np.stack([(t.backward - tables[PLAIN].backward)[:, SECONDS:] for t in tables])
        # (kinds x blocks, classes)
        self.work_rows, self.again_rows = np.concatenate(work), np.concatenate(again)
        # (classes,): blocks run forward in the same way, whatever they keep
        self.forward = tables[PLAIN].forward[:, SECONDS:].sum(axis=0)


def compose(tables: BlockTables, mixtures: NDArray[np.int64], accumulates: bool) -> ComposedPasses:
    """Compose levels and work of passes that differ in what their blocks keep.

    `mixtures` (mixtures, 3) has the number of blocks that keep their input alone, of those after
    them that keep attention, and of those that are swapped. `accumulates`: gradients of an earlier
    micro-batch are there.
    """
    blocks, gradients = tables.num_blocks, tables.gradients
    number = np.arange(blocks)
    whole, selective, swapped = (column[:, None] for column in mixtures.T)
    kinds = np.where(number < whole, WHOLE, np.where(number < whole + selective, SELECTIVE, PLAIN))
    ends = np.where(whole > 0, WHOLE, np.where(selective > 0, SELECTIVE, PLAIN))
    of_segment = np.concatenate([ends, kinds, ends, kinds[:, ::-1]], axis=1)
    segments = np.arange(of_segment.shape[1])
    growth, peak, scratch = (
        tables.rows[:, :, column][of_segment, segments] for column in (GROWTH, PEAK, SCRATCH)
    )
    first_backward = blocks + 2
    starts = np.cumsum(growth, axis=1) - growth
    arrived = np.zeros(growth.shape[1])
    arrived[first_backward:] = np.cumsum(gradients[::-1]) - gradients[::-1]
    if accumulates:  # gradients are there from the start, and nothing new stays
        starts = starts - arrived + gradients.sum()
        arrived[:] = gradients.sum()
    visiting = _visiting_bytes(tables.weights, swapped)
    at = np.argmax(starts + peak + visiting, axis=1)
    one = np.arange(len(mixtures)), at
    is_kind = np.concatenate([kinds == kind for kind in range(len(tables.rows))], axis=1) * 1.0
    return ComposedPasses(
        peak_bytes=starts[one] + peak[one] + visiting[one],
        saved_bytes=starts[one] - arrived[at],
        transient_bytes=peak[one] - scratch[one],
        workspace_bytes=scratch[one],
        gradient_bytes=arrived[at],
        visiting_bytes=visiting[one],
        # One row at a time: the last bits of a product of matrices depend on how many rows it has.
        work=tables.outside_work[ends[:, 0]] + (is_kind[:, None] @ tables.work_rows)[:, 0],
        forward=tables.outside_work[ends[:, 0]] + tables.forward,
        recompute=(is_kind[:, None] @ tables.again_rows)[:, 0],
    )


def _visiting_bytes(
    weights: NDArray[np.float64], swapped: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Weights of swapped blocks on the device in each segment of a pass: of the one that runs, or
    ran last, and of the next, which is fetched when it begins."""
    number = np.arange(len(weights))
    last = np.where(swapped > 0, weights[np.maximum(swapped - 1, 0)], 0.0)
    own = np.where(number < swapped, weights, last)
    following = np.where(number + 1 < swapped, np.append(weights[1:], 0.0), 0.0)
    earlier = np.where(number < swapped, np.append(0.0, weights[:-1]), 0.0)
    first = np.where(swapped > 0, weights[0], 0.0)
    return np.concatenate([first, own + following, last, (own + earlier)[:, ::-1]], axis=1)
