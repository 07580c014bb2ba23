"""Classifies what a trial amounts to: which errors are which outcome, whether a step spilled,
when to prune. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import first_line
from autotune.plan.trial import Outcome, TrialResult
from autotune.system.failures import is_out_of_memory
from autotune.train.monitor import SPILL_FACTOR
from autotune.train.quality import QualityMissed

NEAR_BUDGET = 0.85
"""Share of the budget: settings that need less do not spill."""
CLEARLY_SLOWER = 1.25
"""Times the best median: finishing the trial would not change the order."""
NUM_SPREADS = 4.0
"""Interquartile ranges of the best trial's steps that count as noise."""


def classify_error(error: BaseException) -> Outcome:
    """The outcome that an exception stands for."""
    if isinstance(error, QualityMissed):
        return "numerics"
    if is_out_of_memory(error):
        return "oom"
    text = str(error).lower()
    if (
        isinstance(error, NotImplementedError | ImportError)
        or "not supported" in text
        or "not implemented" in text
    ):
        return "unsupported"
    return "crash"


def first_line_with_notes(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters, and the notes on where it
    happened."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (first_line(error)[:200] or "no message") + notes


@dataclass(frozen=True)
class TimedTrial:
    """The measured step time of a trial, and what was predicted for it at that time."""

    seconds: float
    predicted_seconds: float


def find_spill(
    result: TrialResult, now: TimedTrial | None, earlier: Sequence[TimedTrial], cap_bytes: int
) -> str | None:
    """Why a trial that ran must have gone beyond the device's memory; None if nothing says so.

    Drivers on Windows and WSL move memory to the host instead of failing, and hosts swap. Steps are
    then far slower than predicted, and than what earlier trials say about predictions; all are of
    the same effective batch.
    """
    if result.allocator_retries:
        times = "once" if result.allocator_retries == 1 else f"{result.allocator_retries} times"
        return f"the allocator ran out and started over {times}: a longer run would run out"
    near = (result.peak_memory_bytes or 0) >= NEAR_BUDGET * cap_bytes
    if now is None or not near or not earlier:
        return None
    slowest = max(timed.seconds for timed in earlier)
    ratio = now.seconds / now.predicted_seconds
    usual = max(1.0, *(timed.seconds / timed.predicted_seconds for timed in earlier))
    if ratio < SPILL_FACTOR * usual or now.seconds < SPILL_FACTOR * slowest:
        return None
    return (
        f"a step took {now.seconds:.3g} s, {ratio:.1f} times what was predicted, at the edge "
        "of "
        "memory: it spilled"
    )


def pruning_threshold(best: TrialResult | None) -> float | None:
    """Step seconds above which a trial cannot win against `best`, noise included; None if
    nothing has run."""
    median = best.median_step_seconds if best else None
    if best is None or median is None:
        return None
    ordered = sorted(best.step_seconds)
    spread = (ordered[-1 - len(ordered) // 4] - ordered[len(ordered) // 4]) / median
    return median * max(CLEARLY_SLOWER, 1 + NUM_SPREADS * spread)
