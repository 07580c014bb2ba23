"""What other wishes would bring: which relaxation would fit where nothing does, what a larger effective batch gains.

All of it is predicted, none of it guessed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.backends import WEIGHT_FORMATS
from autotune.cost import Parallel, Predictor
from autotune.errors import InvalidInput, NothingFits
from autotune.families import Family
from autotune.hardware import host_floor_bytes
from autotune.knobs import KNOBS, TuningContext
from autotune.planning.request import PlanRequest
from autotune.schema import Bucket, Candidate, Choice, Workload
from autotune.search import SearchSpace, drop_values, memory_upper_bound

GIB = 2**30
SMALLER = (0.75, 0.5)
"""Shares of the resolution's side that are tried."""
LARGER = (2, 4)
"""Multiples of the effective batch that are tried."""
WHERE_NOTHING_FITS = "swapped_blocks"
"""The knob whose values on request are tried where nothing else fits."""
WORTH_TELLING = 1.05
"""Times the images per second from which a larger batch is mentioned."""


def least_bytes(candidates: Sequence[Candidate], cost: Predictor, *, cautious: bool = False) -> float:
    """Least memory that any of the candidates is predicted to need, `cautious` as a search is before it tries one."""
    # Memory grows with the micro-batch and with every block that keeps its activations.
    least = min(candidate.micro_batch_size for candidate in candidates)
    most = max(candidate.checkpointed_blocks for candidate in candidates)
    safest = [c for c in candidates if (c.micro_batch_size, c.checkpointed_blocks) == (least, most)]
    predictions = [cost.predict(candidate) for candidate in safest or candidates]
    return min(memory_upper_bound(each) if cautious else each.required_memory_bytes for each in predictions)


def within_host(space: SearchSpace, cost: Predictor) -> SearchSpace:
    """The space without candidates whose swapped blocks the host has no room for."""
    host = cost.hardware.host
    room = host.available_memory_bytes
    room -= host_floor_bytes("integrated", host.memory_bytes, room)
    kept = [c for c in space.candidates if not c.swapped_blocks or cost.predict(c).host_memory_bytes <= room]
    levels = {candidate.swapped_blocks for candidate in kept}
    why = f"its weights take more of the host than the {room / GIB:.1f} GiB that it has left"
    dropped: dict[Choice, str] = {k: why for k in space.choices["swapped_blocks"] if k not in levels}
    return replace(drop_values(space, "swapped_blocks", dropped), candidates=tuple(kept)) if kept else space


def shareable(space: SearchSpace) -> SearchSpace:
    """The part of the space whose weights several processes can share out among them; it may have no candidates."""
    why = "the model is shared out over the processes, for which weights must be plain"
    quantized = [name for name in space.choices["quantization"] if not WEIGHT_FORMATS[str(name)].can_shard]
    return drop_values(space, "quantization", dict.fromkeys(quantized, why))


def relaxation(request: PlanRequest, space: SearchSpace, cost: Predictor) -> str:
    """What to ask instead, where nothing of `space` fits: each was predicted to fit, alone, with all else as asked."""
    budget = cost.hardware.device.budget_bytes
    needed = least_bytes(space.candidates, cost, cautious=request.is_local)
    found = [f"{what} ({_amount(need)})" for what, need in _relaxed(request, cost) if need <= budget]
    memory = f"a device on which a run may take {_amount(needed)} (--max-memory, where one is set)"
    if found:
        return f"predicted to fit: {', or '.join(found)}; or take {memory}"
    return f"no smaller quality, resolution, rank or batch is predicted to fit; take {memory}"


def _relaxed(request: PlanRequest, cost: Predictor) -> Iterator[tuple[str, float]]:
    """Options, each with the least memory that a run would need with it."""
    workload, family = cost.workload, cost.family
    qualities = ("exact", "high", "compact")
    options: list[tuple[str, dict[str, object]]] = [
        (f"--quality {quality}", {"quality": quality}) for quality in qualities[qualities.index(workload.quality) + 1 :]
    ]
    options += [
        (f"--resolution {_text(bucket)}", {"buckets": (bucket,), "resolution_px": side})
        for share in SMALLER
        if (bucket := _smaller(workload.largest_bucket, share, family)) is not None
        for side in (max(1, round(workload.resolution_px * share)),)
    ]
    least_batch = f"--batch {cost.parallel.num_processes}"
    options += [(least_batch, {"effective_batch_size": 1})] if workload.effective_batch_size > 1 else []
    options += [("--rank 4", {"rank": 4})] if workload.rank > 4 else []
    asked = [(option, request, workload.changed(**changes)) for option, changes in options]
    if named := [word for word, wish in (("--pin", request.pins), ("--exclude", request.exclusions)) if wish]:
        asked.append((f"without {' and '.join(named)}", replace(request, pins=(), exclusions=()), workload))
    for option, other, relaxed in asked:
        with contextlib.suppress(InvalidInput, NothingFits):  # a pinned value may not go with it
            yield option, _needed(other, relaxed, cost)


def _needed(request: PlanRequest, workload: Workload, cost: Predictor) -> float:
    """Least memory that a run needs for `workload` as `request` has it, by whichever strategy its processes take."""
    hardware, family, number = cost.hardware, cost.family, cost.parallel.num_processes
    space = request.space(TuningContext(hardware, family, workload), also=WHERE_NOTHING_FITS if number == 1 else None)
    ways = {Parallel("ddp", number): space, Parallel("fsdp2", number): shareable(space)} if number > 1 else {}
    known, needs = (family, cost.config, cost.parts, request.caching_pins), []
    for parallel, admitted in (ways or {cost.parallel: space}).items():
        own = Predictor(hardware, workload, *known, parallel)
        if request.caching_pins and cost.resident_encoder_bytes:
            own.caching = cost.caching  # chosen with all of the memory
        if admitted.candidates:
            needs.append(least_bytes(within_host(admitted, own).candidates, own, cautious=request.is_local))
    return min(needs)


def _smaller(bucket: Bucket, share: float, family: Family) -> Bucket | None:
    step = family.size_multiple_px
    width, height = (int(side * share) // step * step for side in (bucket.width_px, bucket.height_px))
    if min(width, height) < step:
        return None
    return bucket.changed(width_px=width, height_px=height)


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _text(bucket: Bucket) -> str:
    square = bucket.width_px == bucket.height_px
    return str(bucket.width_px) if square else f"{bucket.width_px}x{bucket.height_px}"


def larger_batch_advice(cost: Predictor, best: Candidate, step_seconds: float, budget_bytes: int) -> tuple[str, ...]:
    """What a larger effective batch would gain with the chosen kernels and storage; nothing where it gains nothing.

    Args:
        cost: calibrated by the trials.
        best: the settings that won.
        step_seconds: what a step takes with them.
        budget_bytes: what a run may take.
    """
    effective = cost.workload.effective_batch_size
    now, context = effective / step_seconds, TuningContext(cost.hardware, cost.family, cost.workload)
    best_gain, best_batch = WORTH_TELLING, 0
    for batch in (effective * factor for factor in LARGER):
        for blocks in range(cost.workload.model.num_blocks):
            candidate = best.changed(micro_batch_size=batch, checkpointed_blocks=blocks)
            if any(knob.conflict(candidate, context) for knob in KNOBS):
                continue
            prediction = cost.predict(candidate)
            gain = batch / prediction.step_seconds / now
            if prediction.required_memory_bytes <= budget_bytes and gain > best_gain:
                best_gain, best_batch = gain, batch
    if not best_batch:
        return ()
    whole = best_batch * cost.parallel.num_processes
    return (
        f"an effective batch of {whole} is predicted to train {best_gain:.2f}x as many images per second; it is not "
        "chosen for you, because it changes what is learned",
    )
