"""Picks the winner among what was measured, or predicted where nothing can be measured, and says why: pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.errors import NothingFits
from autotune.schema import Candidate, Choice, Objective, Prediction, Reason, Rejected, TrialResult
from autotune.search.space import SearchSpace

GIB = 2**30
MOST_FALLBACKS = 5


@dataclass(frozen=True)
class Score:
    """What is known of a candidate: how fast and how large it is, or why it cannot run."""

    candidate: Candidate
    step_seconds: float
    peak_memory_bytes: int
    failure: str | None = None
    """None when it runs; then both figures hold."""


def measured_scores(results: Sequence[TrialResult]) -> list[Score]:
    """From trials; of a candidate that was tried again the last one counts, unless it only took too long."""
    last: dict[Candidate, TrialResult] = {}
    for result in results:
        known = last.get(result.candidate)
        if known is None or known.outcome != "ok" or result.outcome != "timeout":
            last[result.candidate] = result
    return [
        Score(
            result.candidate,
            result.median_step_seconds or 0.0,
            result.peak_memory_bytes or 0,
            None if result.outcome == "ok" else f"{result.outcome}: {result.message}",
        )
        for result in last.values()
    ]


def promised_scores(results: Sequence[TrialResult]) -> list[Score]:
    """What a winner is chosen from: candidates that longer trials confirmed, where there are any, else all."""
    confirmed = {result.candidate for result in results if result.confirms and result.outcome == "ok"}
    scores = measured_scores(results)
    return [score for score in scores if score.candidate in confirmed] or scores


def predicted_scores(predictions: Sequence[Prediction], budget_bytes: int) -> list[Score]:
    """From predictions: what needs more than the budget in any phase cannot run."""
    return [
        Score(
            prediction.candidate,
            prediction.step_seconds,
            prediction.required_memory_bytes,
            None if prediction.required_memory_bytes <= budget_bytes else _too_large(prediction, budget_bytes),
        )
        for prediction in predictions
    ]


def _too_large(prediction: Prediction, budget_bytes: int) -> str:
    phase = max(prediction.phases, key=lambda phase: phase.peak_memory_bytes)
    needed = prediction.required_memory_bytes
    return f"needs {needed / GIB:.1f} GiB in the {phase.name} phase, {budget_bytes / GIB:.1f} GiB may be taken"


def winner_of(scores: Sequence[Score], objective: Objective) -> Score | None:
    """The best that runs: fastest, or smallest for `memory`; ties go to the smaller, then the earlier."""

    def key(score: Score) -> tuple[float, float]:
        time, memory = score.step_seconds, float(score.peak_memory_bytes)
        return (time, memory) if objective == "throughput" else (memory, time)

    return min((score for score in scores if score.failure is None), key=key, default=None)


def require_winner(scores: Sequence[Score], objective: Objective, relaxation: Callable[[], str]) -> Score:
    """The winner.

    Raises:
        NothingFits: nothing runs; `relaxation` finds out what would help.
    """
    best = winner_of(scores, objective)
    if best is None:
        nearest = min(scores, key=lambda score: score.peak_memory_bytes, default=None)
        why = nearest.failure if nearest else "every setting is predicted to need more than a run may take"
        raise NothingFits(f"nothing runs here: {why}", hint=relaxation())
    return best


def fallbacks_of(scores: Sequence[Score], winner: Score) -> tuple[Candidate, ...]:
    """Settings that run in less memory than the winner, the fastest first, each smaller than the one before."""
    ladder: list[Score] = []
    running = [score for score in scores if score.failure is None]
    for score in sorted(running, key=lambda s: (s.step_seconds, s.peak_memory_bytes)):
        smallest = (ladder[-1] if ladder else winner).peak_memory_bytes
        if score.peak_memory_bytes < smallest * 0.98:
            ladder.append(score)
    return tuple(score.candidate for score in ladder[:MOST_FALLBACKS])


def reasons_for(space: SearchSpace, scores: Sequence[Score], winner: Score, objective: Objective) -> tuple[Reason, ...]:
    """One reason per knob: what was chosen, and for every other value what spoke against it."""
    return tuple(_reason(name, space, scores, winner, objective) for name in space.choices)


def _reason(knob: str, space: SearchSpace, scores: Sequence[Score], winner: Score, objective: Objective) -> Reason:
    chosen: Choice = getattr(winner.candidate, knob)
    others = [choice for choice in space.choices[knob] if choice != chosen]
    best = {choice: _best_with(knob, choice, scores, objective) for choice in others}
    own = winner_of([score for score in scores if score.candidate == winner.candidate], objective)
    even = own or winner  # others ran for a short time: compared with the winner's short trial, not its long one
    ran = {chosen, *(choice for choice, score in best.items() if score)}  # what they don't go with is then no reason
    excluded = [item for item in space.rejected[knob] if item.choice not in ran]
    left = {choice: score for choice, score in best.items() if choice not in {item.choice for item in excluded}}
    rejected = [*excluded, *(Rejected(choice=c, reason=_compare(score, even)) for c, score in left.items())]
    if not others:
        why = "the only value that is searched here"
    elif any(best.values()):
        why = f"part of the {'fastest' if objective == 'throughput' else 'smallest'} settings that run"
    else:
        why = "its alternatives were not tried: trials went to what promised more"
    return Reason(knob=knob, chosen=chosen, why=why, rejected=tuple(rejected))


def _best_with(knob: str, choice: Choice, scores: Sequence[Score], objective: Objective) -> Score | None:
    having = [score for score in scores if getattr(score.candidate, knob) == choice]
    smallest = min(having, key=lambda score: score.peak_memory_bytes, default=None)
    return winner_of(having, objective) or smallest


def _compare(best: Score | None, winner: Score) -> str:
    if best is None:
        return "not tried: it did not promise to be better"
    if best.failure:
        return best.failure
    time = best.step_seconds / winner.step_seconds
    memory = best.peak_memory_bytes / winner.peak_memory_bytes
    return f"at best {time:.2f}x the step time at {memory:.2f}x the memory ({best.candidate.label()})"
