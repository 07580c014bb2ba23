"""Picks the winner of a search and says why: pure."""

from collections.abc import Sequence

from autotune.errors import NothingFits
from autotune.schema import Candidate, Choice, Objective, Reason, Rejected, TrialResult
from autotune.search.space import SearchSpace


def winner_of(results: Sequence[TrialResult], objective: Objective) -> TrialResult:
    """The best trial that ran: fastest, or smallest for `memory`; ties go to the smaller, then the earlier.

    Raises:
        NothingFits: none ran.
    """
    ran = [result for result in results if result.outcome == "ok"]
    if not ran:
        last = results[-1] if results else None
        why = f"{last.outcome}: {last.message}" if last else "there was nothing to try"
        raise NothingFits(
            f"none of {len(results)} trials ran ({why})",
            hint="try a smaller --resolution or --rank, or --quality compact",
        )

    def key(result: TrialResult) -> tuple[float, float]:
        time, memory = result.median_step_seconds or 0.0, float(result.peak_memory_bytes or 0)
        return (time, memory) if objective == "throughput" else (memory, time)

    return min(ran, key=key)


def fallbacks_of(results: Sequence[TrialResult], winner: TrialResult) -> tuple[Candidate, ...]:
    """Settings that ran in less memory than the winner, the fastest first, each smaller than the one before."""
    ladder: list[TrialResult] = []
    for result in sorted(
        (r for r in results if r.outcome == "ok"),
        key=lambda r: (r.median_step_seconds or 0.0, r.peak_memory_bytes or 0),
    ):
        smallest = (ladder[-1] if ladder else winner).peak_memory_bytes or 0
        if (result.peak_memory_bytes or 0) < smallest:
            ladder.append(result)
    return tuple(result.candidate for result in ladder)


def reasons_for(
    space: SearchSpace, results: Sequence[TrialResult], winner: TrialResult, objective: Objective
) -> tuple[Reason, ...]:
    """One reason per knob: what was chosen, and for every other value the measurement or rule that spoke against it."""
    return tuple(_reason(name, space, results, winner, objective) for name in space.choices)


def _reason(
    knob: str, space: SearchSpace, results: Sequence[TrialResult], winner: TrialResult, objective: Objective
) -> Reason:
    chosen: Choice = getattr(winner.candidate, knob)
    others = [choice for choice in space.choices[knob] if choice != chosen]
    rejected = [*space.rejected[knob]]
    barred = {item.choice for item in rejected}
    tried = {choice: _best_with(knob, choice, results, objective) for choice in others}
    rejected += [
        Rejected(choice=choice, reason=_compare(best, winner)) for choice, best in tried.items() if choice not in barred
    ]
    if not others:
        why = "the only value that can be used here"
    elif any(tried.values()):
        why = f"part of the {'fastest' if objective == 'throughput' else 'smallest'} of the settings tried"
    else:
        why = "its alternatives were not tried: trials went to what promised more"
    return Reason(knob=knob, chosen=chosen, why=why, rejected=tuple(rejected))


def _best_with(knob: str, choice: Choice, results: Sequence[TrialResult], objective: Objective) -> TrialResult | None:
    having = [result for result in results if getattr(result.candidate, knob) == choice]
    try:
        return winner_of(having, objective)
    except NothingFits:
        return having[-1] if having else None


def _compare(best: TrialResult | None, winner: TrialResult) -> str:
    if best is None:
        return "not tried: it did not promise to be better"
    if best.outcome != "ok":
        return f"{best.outcome}: {best.message}"
    time, memory = (
        _ratio(best.median_step_seconds, winner.median_step_seconds),
        _ratio(best.peak_memory_bytes, winner.peak_memory_bytes),
    )
    return f"at best {time:.2f}x the step time at {memory:.2f}x the memory ({best.candidate.label()})"


def _ratio(value: float | None, reference: float | None) -> float:
    return value / reference if value and reference else 1.0
