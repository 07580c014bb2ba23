"""What other requests would bring: which relaxation would fit if nothing does, what a larger
effective batch gains.

All of it is predicted, none of it guessed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from autotune.cost.predict import CostModel
from autotune.errors import InvalidInput, NothingFits
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.registry import KNOBS
from autotune.machine.memory import host_floor_bytes
from autotune.models.family import Family
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.workload import Bucket, Quality, Workload
from autotune.search.mixtures import find_mixtures, with_mixtures
from autotune.search.request import PlanRequest
from autotune.search.residual import memory_upper_bound
from autotune.search.space import SearchSpace, drop_values

GIB = 2**30
SMALLER_SIDES = (0.75, 0.5)
"""Shares of the resolution's side that are tried."""
LARGER_BATCHES = (2, 4)
"""Multiples of the effective batch that are tried."""
MIN_GAIN = 1.05
"""Factor of images per second from which a larger batch is mentioned."""


def min_required_bytes(
    candidates: Sequence[Candidate], cost: CostModel, *, cautious: bool = False
) -> float:
    """Least memory that any candidate is predicted to need; `cautious` as a search is before its
    first trial."""
    # Memory grows with the micro-batch and with every block that keeps its activations.
    smallest = min(candidate.micro_batch_size for candidate in candidates)
    deepest = max(candidate.checkpointed_blocks for candidate in candidates)
    safest = [
        c for c in candidates if (c.micro_batch_size, c.checkpointed_blocks) == (smallest, deepest)
    ]
    predictions = [cost.predict(candidate) for candidate in safest or candidates]
    return min(
        memory_upper_bound(each) if cautious else each.run_memory_bytes for each in predictions
    )


def drop_beyond_host(space: SearchSpace, cost: CostModel) -> SearchSpace:
    """The space without candidates that keep more on the host, in all its processes, than it has
    memory left; if all do, those that keep least."""
    host, number = cost.hardware.host, cost.parallel.num_processes
    room = host.available_memory_bytes
    room -= host_floor_bytes("integrated", host.memory_bytes, room)
    fitting: list[Candidate] = []
    beyond: dict[Candidate, int] = {}
    for each in space.candidates:
        stays = not each.swapped_blocks and each.modulation != "ahead"
        if stays or (needed := number * cost.host_memory_bytes(each)) <= room:
            fitting.append(each)
        else:
            beyond[each] = needed
    if not fitting:  # whatever is pinned takes so much: then as little as can be
        least = min(beyond.values(), default=0)
        fitting = [each for each, needed in beyond.items() if needed == least]
    max_fitting = max((candidate.swapped_blocks for candidate in fitting), default=0)
    min_beyond = min((candidate.swapped_blocks for candidate in beyond), default=0)
    why = f"its weights take more of the host than the {room / GIB:.1f} GiB that it has left"
    first = max(max_fitting + 1, min_beyond)
    dropped: dict[Choice, str] = {
        k: why for k in space.choices["swapped_blocks"] if beyond and int(k) >= first
    }
    return replace(drop_values(space, "swapped_blocks", dropped), candidates=tuple(fitting))


def drop_block_swap(space: SearchSpace, num_processes: int) -> SearchSpace:
    """The part of the space that several processes can use.

    Raises:
        InvalidInput: blocks are to be swapped.
    """
    why = "several processes shard the weights instead"
    space = drop_values(
        space,
        "swapped_blocks",
        {number: why for number in space.choices["swapped_blocks"] if number},
    )
    if not space.candidates:
        what = f"blocks cannot be swapped with --gpus {num_processes}: {why}"
        raise InvalidInput(what, hint="leave one of them out")
    return space


def keep_shardable(space: SearchSpace) -> SearchSpace:
    """The part of the space whose weights several processes can shard; it may have no
    candidates."""
    why = "the weights are sharded over the processes, and this format cannot be sharded"
    quantized = [
        name for name in space.choices["quantization"] if not WEIGHT_FORMATS[str(name)].can_shard
    ]
    space = drop_values(space, "quantization", dict.fromkeys(quantized, why))
    gathered = (
        "when weights are sharded over processes, those that it is computed from are "
        "gathered only "
        "during a pass"
    )
    ahead = [value for value in space.choices["modulation"] if value == "ahead"]
    return drop_values(space, "modulation", dict.fromkeys(ahead, gathered))


def suggest_relaxation(request: PlanRequest, space: SearchSpace, cost: CostModel) -> str:
    """What to ask for instead if nothing of `space` fits: each is predicted to fit, alone, with
    all else as asked."""
    needed = min_required_bytes(space.candidates, cost, cautious=request.is_local)
    found = [f"{option} ({_amount(need)})" for option, need in _fitting_relaxations(request, cost)]
    memory = f"a device on which a run may take {_amount(needed)} (--max-memory, if you set one)"
    if found:
        return f"predicted to fit: {', or '.join(found)}; or take {memory}"
    return f"no smaller quality, resolution, rank or batch is predicted to fit; take {memory}"


def _fitting_relaxations(request: PlanRequest, cost: CostModel) -> Iterator[tuple[str, float]]:
    """Options that are predicted to fit, each with the least memory that a run would need with
    it."""
    workload, family = cost.workload, cost.family
    qualities = get_args(Quality)
    options: list[tuple[str, dict[str, object]]] = [
        (f"--quality {quality}", {"quality": quality})
        for quality in qualities[qualities.index(workload.quality) + 1 :]
    ]
    options += [
        (f"--resolution {_size_text(bucket)}", {"buckets": (bucket,), "resolution_px": side})
        for share in SMALLER_SIDES
        if (bucket := _scale(workload.largest_bucket, share, family)) is not None
        for side in (max(1, round(workload.resolution_px * share)),)
    ]
    smallest_batch = f"--batch {cost.parallel.num_processes}"
    options += (
        [(smallest_batch, {"effective_batch_size": 1})] if workload.effective_batch_size > 1 else []
    )
    options += [("--rank 4", {"rank": 4})] if workload.rank > 4 else []
    relaxed = [(option, request, workload.changed(**changes)) for option, changes in options]
    if named := [
        word
        for word, pairs in (("--pin", request.pins), ("--exclude", request.exclusions))
        if pairs
    ]:
        relaxed.append(
            (f"without {' and '.join(named)}", replace(request, pins=(), exclusions=()), workload)
        )
    for option, other, work in relaxed:
        with contextlib.suppress(InvalidInput, NothingFits):  # a pinned value may not go with it
            needed, budget_bytes = _required_bytes(other, work, cost)
            if needed <= budget_bytes:
                yield option, needed


def _required_bytes(request: PlanRequest, workload: Workload, cost: CostModel) -> tuple[float, int]:
    """Least memory that a run for `workload` needs, by whichever strategy its processes take,
    and what it may take."""
    number = cost.parallel.num_processes
    own = CostModel.build(
        cost.hardware,
        workload,
        cost.family,
        cost.model.config,
        cost.model.parts,
        memory_budget=cost.memory_budget,
        caching=(cost.caching, cost.caching_reason)
        if request.caching_pins and cost.resident_encoder_bytes
        else None,
        caching_pins=request.caching_pins,
        caching_exclusions=request.caching_exclusions,
        overheads=cost.overheads,
        parallel=cost.parallel,
    )
    space = request.space(own.context)
    smallest = min(candidate.micro_batch_size for candidate in space.candidates)
    larger: dict[Choice, str] = {
        k: "needs more" for k in space.choices["micro_batch_size"] if k != smallest
    }
    space = with_mixtures(drop_values(space, "micro_batch_size", larger), own)
    ways = {own.parallel: space}
    if number > 1:
        space = drop_block_swap(space, number)
        together = replace(own.parallel, strategy="ddp")
        ways = {together: space, replace(together, strategy="fsdp2"): keep_shardable(space)}
    needed = []
    for parallel, admitted in ways.items():
        if admitted.candidates:
            alone = own.with_parallel(parallel)
            within = drop_beyond_host(admitted, alone).candidates
            needed.append(min_required_bytes(within, alone, cautious=request.is_local))
    return min(needed), own.training_budget.num_bytes


def _scale(bucket: Bucket, share: float, family: Family) -> Bucket | None:
    step = family.size_multiple_px
    width, height = (
        int(side * share) // step * step for side in (bucket.width_px, bucket.height_px)
    )
    if min(width, height) < step:
        return None
    return bucket.changed(width_px=width, height_px=height)


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _size_text(bucket: Bucket) -> str:
    is_square = bucket.width_px == bucket.height_px
    return str(bucket.width_px) if is_square else f"{bucket.width_px}x{bucket.height_px}"


def advise_larger_batch(
    space: SearchSpace, cost: CostModel, best: Candidate, step_seconds: float
) -> tuple[str, ...]:
    """What a larger effective batch would gain with the chosen kernels and weight format; nothing
    if it gains little.

    Args:
        space: the admitted numbers of blocks.
        cost: calibrated by the trials.
        best: the settings that won.
        step_seconds: time of an optimizer step with them.
    """
    effective, budget_bytes, context = (
        cost.workload.effective_batch_size,
        cost.training_budget.num_bytes,
        cost.context,
    )
    best_gain, best_batch = MIN_GAIN, 0
    for batch in (effective * factor for factor in LARGER_BATCHES):
        base = best.changed(micro_batch_size=batch)
        if any(knob.conflict(base, context) for knob in KNOBS):
            continue
        for candidate in find_mixtures(base, space.choices, cost):
            prediction = cost.predict(candidate)
            gain = batch / prediction.step_seconds / (effective / step_seconds)
            if prediction.run_memory_bytes <= budget_bytes and gain > best_gain:
                best_gain, best_batch = gain, batch
    if not best_batch:
        return ()
    global_batch = best_batch * cost.parallel.num_processes
    return (
        f"an effective batch of {global_batch} is predicted to train {best_gain:.2f}x as many "
        "images per second; it is "
        "not chosen for you, because it changes what is learned",
    )
