"""Picks the winner among what was measured, or predicted if nothing can be measured, and says
why: pure."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.cost.predict import CostModel
from autotune.errors import NothingFits
from autotune.knobs.registry import KNOBS, PARITY
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.plan import Reason, Rejected
from autotune.plan.prediction import Prediction
from autotune.plan.trial import TrialResult
from autotune.plan.workload import GOALS, Objective
from autotune.search.space import SearchSpace

GIB = 2**30
MAX_FALLBACKS = 5
MAX_FALLBACK_SHARE = 0.95
"""Memory of each fallback, relative to the settings before it."""
TIE = 0.03
"""Share by which a time or an amount of memory may exceed the best and still count as equal:
`MIN_GAIN` of a search."""
COMPOSED = frozenset(knob.name for knob in KNOBS if knob.is_composed)
"""Knobs that are numbers of blocks."""
ENERGY_HINT = (
    "an NVIDIA GPU (Volta or newer) reports it while nothing else computes; or leave "
    "--objective "
    "energy out"
)
LOSSY = ("quantization", "precision")
"""Knobs that decide how exactly the model is computed."""


@dataclass(frozen=True)
class Score:
    """What is known of a candidate: how fast and how large it is, or why it cannot run."""

    candidate: Candidate
    step_seconds: float
    peak_memory_bytes: int
    failure: str | None = None
    """None if it runs; then the figures hold."""
    joules_per_image: float | None = None
    """Energy as a trial measured it; None if none did."""

    def value(self, objective: Objective) -> float:
        """What the objective wants little of: seconds, bytes or joules; infinite if that is not
        known."""
        if objective == "energy":
            return math.inf if self.joules_per_image is None else self.joules_per_image
        return self.step_seconds if objective == "throughput" else self.peak_memory_bytes


def score_trials(results: Sequence[TrialResult]) -> list[Score]:
    """Scores from trials; if a candidate was tried again the last trial counts, unless it only took
    too long.

    So does the last that told its energy.
    """
    last: dict[Candidate, TrialResult] = {}
    for result in results:
        earlier = last.get(result.candidate)
        if earlier is None or earlier.outcome != "ok" or result.outcome != "timeout":
            last[result.candidate] = result
    joules = {
        result.candidate: result.joules_per_image
        for result in results
        if result.joules_per_image is not None
    }
    return [
        Score(
            result.candidate,
            result.median_step_seconds or 0.0,
            result.peak_memory_bytes or 0,
            None if result.outcome == "ok" else f"{result.outcome}: {result.message}",
            joules.get(result.candidate),
        )
        for result in last.values()
    ]


def score_finalists(results: Sequence[TrialResult]) -> list[Score]:
    """Scores that a winner is chosen from: of candidates that longer trials confirmed, if there
    are any, else all."""
    confirmed = {
        result.candidate for result in results if result.confirms and result.outcome == "ok"
    }
    scores = score_trials(results)
    return [score for score in scores if score.candidate in confirmed] or scores


def refuse_beyond(scores: Sequence[Score], cost: CostModel, budget_bytes: int) -> list[Score]:
    """The scores of trials, those refused that would need more than the budget in another
    program; `cost` has learned from the trials, which ran in autotune's executor."""
    if cost.overheads is None:
        return list(scores)
    needed = {one.candidate: cost.predict(one.candidate) for one in scores if one.failure is None}
    beyond = {
        one.candidate: one.failure for one in score_predictions(list(needed.values()), budget_bytes)
    }
    return [replace(one, failure=one.failure or beyond[one.candidate]) for one in scores]


def score_predictions(predictions: Sequence[Prediction], budget_bytes: int) -> list[Score]:
    """Scores from predictions: what needs more than the budget in any phase cannot run."""
    return [
        Score(
            prediction.candidate,
            prediction.step_seconds,
            prediction.run_memory_bytes,
            None
            if prediction.run_memory_bytes <= budget_bytes
            else _too_large(prediction, budget_bytes),
        )
        for prediction in predictions
    ]


def _too_large(prediction: Prediction, budget_bytes: int) -> str:
    phase = max(prediction.phases, key=lambda phase: phase.run_memory_bytes)
    needed = prediction.run_memory_bytes
    return (
        f"needs {needed / GIB:.1f} GiB in the {phase.name} phase, {budget_bytes / GIB:.1f} GiB "
        "may "
        "be taken"
    )


def choose_winner(scores: Sequence[Score], objective: Objective) -> Score | None:
    """The best that runs: fastest, smallest for `memory`, or for `energy` with the least joules of
    those that told.

    Of those within `TIE` of it, the most exact wins, then the smallest (else the fastest), then the
    simplest. So what may be chosen from more is slower by `TIE` at most than what is chosen from
    less, and no slower if nothing ties.
    """
    first = operator.methodcaller("value", objective)
    second = operator.methodcaller("value", "memory" if objective == "throughput" else "throughput")
    left = [score for score in scores if score.failure is None and math.isfinite(first(score))]
    for key, tie in ((first, TIE), (_inexactness, 0.0), (second, TIE), (_complexity, 0.0)):
        best = min(map(key, left), default=0.0)
        left = [score for score in left if key(score) <= (1 + tie) * best]
    return min(left, key=lambda score: (first(score), second(score)), default=None)


def _inexactness(score: Score) -> float:
    """Relative error of gradients that weight format and precision may bring."""
    chosen = (PARITY[name](getattr(score.candidate, name)) for name in LOSSY)
    return sum(parity.tolerance for parity in chosen if parity)


def _complexity(score: Score) -> int:
    """Number of knobs that are not as in a plain training loop."""
    plain = Candidate(micro_batch_size=score.candidate.micro_batch_size, checkpointed_blocks=0)
    return sum(value != getattr(plain, name) for name, value in score.candidate)


def energy_unknown(why: str = "") -> NothingFits:
    """What to raise if trials ran and none told the energy that is the objective; `why` is a
    trial's message."""
    what = "no trial could measure how much energy its steps took"
    return NothingFits(f"{what}: {why}" if why else what, hint=ENERGY_HINT)


def require_winner(
    scores: Sequence[Score], objective: Objective, relaxation: Callable[[], str]
) -> Score:
    """The winner.

    Raises:
        NothingFits: nothing runs, and `relaxation` finds out what would help; or no trial told its
            energy.
    """
    best = choose_winner(scores, objective)
    if best is None:
        if any(score.failure is None for score in scores):
            raise energy_unknown()
        nearest = min(scores, key=lambda score: score.peak_memory_bytes, default=None)
        why = "every setting is predicted to need more than a run may take"
        if nearest and nearest.failure:
            why = nearest.failure
        raise NothingFits(f"nothing runs here: {why}", hint=relaxation())
    return best


def choose_fallbacks(scores: Sequence[Score], winner: Score) -> tuple[Candidate, ...]:
    """Settings that run in less memory than the winner, the fastest first, each smaller than the
    one before."""
    fallbacks: list[Score] = []
    running = [score for score in scores if score.failure is None]
    for score in sorted(running, key=lambda s: (s.step_seconds, s.peak_memory_bytes)):
        if (
            score.peak_memory_bytes
            < MAX_FALLBACK_SHARE * [winner, *fallbacks][-1].peak_memory_bytes
        ):
            fallbacks.append(score)
    return tuple(score.candidate for score in fallbacks[:MAX_FALLBACKS])


def explain_choices(
    space: SearchSpace, scores: Sequence[Score], winner: Score, objective: Objective
) -> tuple[Reason, ...]:
    """One reason per knob: what was chosen, and for every other value what spoke against it."""
    # Others ran for a short time: they are compared with the winner's short trial, not its long
    # one.
    own = (
        choose_winner([score for score in scores if score.candidate == winner.candidate], objective)
        or winner
    )
    return tuple(_explain_choice(name, space, scores, own, objective) for name in space.rejected)


def _explain_choice(
    knob: str, space: SearchSpace, scores: Sequence[Score], own: Score, objective: Objective
) -> Reason:
    chosen: Choice = getattr(own.candidate, knob)
    others = _others(knob, chosen, space, scores)
    best = {choice: _best_with(knob, choice, scores, objective) for choice in others}
    ran = {
        chosen,
        *(choice for choice, score in best.items() if score),
    }  # a conflict of theirs is then no reason
    rejected = [item for item in space.rejected[knob] if item.choice not in ran]
    if knob in COMPOSED:  # of numbers that the same speaks against, the first stands for all
        rejected = list({item.reason: item for item in reversed(rejected)}.values())[::-1]
    explained = {item.choice for item in rejected}
    left = {choice: score for choice, score in best.items() if choice not in explained}
    rejected += [
        Rejected(choice=choice, reason=_compare(score, own)) for choice, score in left.items()
    ]
    if not others:
        why = "the only value that is searched here"
    elif any(best.values()):
        why = f"part of the {GOALS[objective]} settings that run"
        if any(
            score.value(objective) < own.value(objective)
            for score in best.values()
            if score and not score.failure
        ):
            why += (
                f", within {TIE:.0%}: such ties go to what is more exact, then smaller, then "
                "simpler"
            )
    else:
        why = "its alternatives were not tried: trials went to what promised more"
    return Reason(knob=knob, chosen=chosen, why=why, rejected=tuple(rejected))


def _others(knob: str, chosen: Choice, space: SearchSpace, scores: Sequence[Score]) -> list[Choice]:
    """The values to compare the chosen one with: all others that are searched or were tried; of
    numbers of blocks the next and the last either way that were looked at."""
    if knob not in COMPOSED:
        tried = [
            choice
            for choice in space.tried_choices[knob]
            if any(_has(score, knob, choice) for score in scores)
        ]
        return [
            choice for choice in dict.fromkeys((*space.choices[knob], *tried)) if choice != chosen
        ]
    numbers = sorted({int(getattr(score.candidate, knob)) for score in scores})
    below, above = [n for n in numbers if n < int(chosen)], [n for n in numbers if n > int(chosen)]
    return list(dict.fromkeys((*above[-1:], *above[:1], *below[-1:], *below[:1])))


def _best_with(
    knob: str, choice: Choice, scores: Sequence[Score], objective: Objective
) -> Score | None:
    having = [score for score in scores if _has(score, knob, choice)]
    smallest = min(having, key=lambda score: score.peak_memory_bytes, default=None)
    return choose_winner(having, objective) or smallest


def _has(score: Score, knob: str, choice: Choice) -> bool:
    return bool(getattr(score.candidate, knob) == choice)


def _compare(best: Score | None, winner: Score) -> str:
    if best is None:
        return "not tried: it did not promise to be better"
    if best.failure:
        return best.failure
    time = best.step_seconds / winner.step_seconds
    memory = best.peak_memory_bytes / winner.peak_memory_bytes
    energy = ""
    if best.joules_per_image and winner.joules_per_image:
        energy = f" and {best.joules_per_image / winner.joules_per_image:.2f}x the energy"
    return (
        f"at best {time:.2f}x the step time at {memory:.2f}x the memory{energy} "
        f"({best.candidate.label()})"
    )
