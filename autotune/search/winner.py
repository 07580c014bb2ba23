"""Picks the winner among what was measured, or predicted if nothing can be, and says why.

Before a plan promises anything, the winner is tried for longer, and compiled if the planned steps
are predicted to pay the start-up back.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.cost.predict import CostModel
from autotune.errors import NothingFits
from autotune.knobs.registry import GRADIENT_TOLERANCES, KNOBS, startup_seconds
from autotune.plan.candidate import Candidate, Choice, TrialResult, counting_trials, nearest_numbers
from autotune.plan.plan import Reason, Rejected
from autotune.plan.prediction import Prediction
from autotune.plan.words import PHASES, label_of
from autotune.plan.workload import GOALS, Objective
from autotune.search.problem import PlanningProblem
from autotune.search.space import TIE, SearchSpace

GIB = 2**30
MAX_FALLBACKS = 5
MAX_FALLBACK_SHARE = 0.95  # memory of each fallback, relative to the settings before it
HOST_TIE_BYTES = 2 * GIB  # so much more of the host's memory counts as equal
COMPOSED = frozenset(knob.name for knob in KNOBS if knob.is_composed)
LOSSY = ("quantization", "precision")  # knobs that decide how exactly the model is computed
MAX_CONFIRMATIONS = 3  # winners that are tried for longer; those that fail do not count
SHARE_OF_SEARCH = 0.1  # of the time that the search may take, for the steps of the longer trial
MIN_REHEARSAL_SECONDS = 5.0
WORTH_CONFIRMING = 0.95  # of the confirmed value: what a short trial must undercut to be confirmed
MAX_UNTRIED_SHARE = 0.9  # largest memory of a fallback, as a share of the winner's
BLOCK, OFF = "block", "off"
_COMPILED_IF = "settings are compiled if a trial shows that it pays"

Trials = tuple[TrialResult, ...]


@dataclass(frozen=True)
class Score:
    """Speed and size of a candidate, or the reason why it cannot run."""

    candidate: Candidate
    step_seconds: float
    peak_memory_bytes: int
    failure: str | None = None  # None if it runs; then the figures hold
    host_memory_bytes: int = 0

    def value(self, objective: Objective) -> float:
        return self.step_seconds if objective == "throughput" else self.peak_memory_bytes


def score_trials(results: Sequence[TrialResult]) -> list[Score]:
    """Score each candidate by the trial that counts."""
    return [
        Score(
            result.candidate,
            result.median_step_seconds or 0.0,
            result.peak_memory_bytes or 0,
            None if result.outcome == "ok" else f"{result.outcome}: {result.message}",
            result.host_memory_bytes or 0,
        )
        for result in counting_trials(results)
    ]


def mark_disturbed(trials: Trials) -> Trials:
    """Mark each short trial that ran faster in another of the same settings: noise only slows."""
    fastest: dict[Candidate, float] = {}
    for trial in filter(_is_short, trials):
        seconds = trial.median_step_seconds or math.inf
        fastest[trial.candidate] = min(seconds, fastest.get(trial.candidate, math.inf))
    changes = {"outcome": "disturbed", "message": "the same settings were faster in another trial"}
    marked = []
    for trial in trials:
        seconds = trial.median_step_seconds or math.inf
        is_slow = _is_short(trial) and seconds > fastest[trial.candidate]
        marked.append(trial.changed(**changes) if is_slow else trial)
    return tuple(marked)


def _is_short(trial: TrialResult) -> bool:
    return _is_plain(trial) and not trial.confirms


def score_finalists(results: Sequence[TrialResult]) -> list[Score]:
    """Score what longer trials confirmed, if there are any, else all."""
    confirmed = {trial.candidate for trial in results if trial.confirms and trial.outcome == "ok"}
    scores = score_trials(results)
    return [score for score in scores if score.candidate in confirmed] or scores


def refuse_beyond(scores: Sequence[Score], cost: CostModel, budget_bytes: int) -> list[Score]:
    """Refuse what would need more than the budget in another program, by what was learned."""
    if cost.overheads is None:
        return list(scores)
    needed = [cost.predict(one.candidate) for one in scores if one.failure is None]
    beyond = {one.candidate: one.failure for one in score_predictions(needed, budget_bytes)}
    return [replace(one, failure=one.failure or beyond[one.candidate]) for one in scores]


def score_predictions(predictions: Sequence[Prediction], budget_bytes: int) -> list[Score]:
    """Score predictions: what needs more than the budget in any phase cannot run."""
    scores = []
    for each in predictions:
        needed, failure = each.run_memory_bytes, None
        if needed > budget_bytes:
            phase = max(each.phases, key=lambda phase: phase.run_memory_bytes)
            limit = f"{budget_bytes / GIB:.1f} GiB may be taken"
            failure = f"needs {needed / GIB:.1f} GiB for {PHASES[phase.name]}, {limit}"
        score = Score(each.candidate, each.step_seconds, needed, failure, each.host_memory_bytes)
        scores.append(score)
    return scores


def choose_winner(scores: Sequence[Score], objective: Objective) -> Score | None:
    """Choose the fastest that runs, or the smallest for `memory`; within `TIE` of it what is
    most exact, then takes least of the host, by `HOST_TIE_BYTES`, then simplest, then smallest
    (for `memory` the fastest, then simplest)."""
    left = [score for score in scores if score.failure is None]
    if not left:
        return None
    is_fast = objective == "throughput"
    first = (operator.methodcaller("value", objective), TIE, 0)
    second = (operator.methodcaller("value", "memory" if is_fast else "throughput"), TIE, 0)
    host = (operator.attrgetter("host_memory_bytes"), 0.0, HOST_TIE_BYTES)
    simple = (_complexity, 0.0, 0)
    last = (simple, second) if is_fast else (second, simple)
    for key, tie, slack in (first, (_inexactness, 0.0, 0), host, *last):
        limit = (1 + tie) * min(map(key, left)) + slack
        left = [score for score in left if key(score) <= limit]
    return min(left, key=lambda score: (first[0](score), second[0](score)))


def _inexactness(score: Score) -> float:
    rules = (GRADIENT_TOLERANCES[name](getattr(score.candidate, name)) for name in LOSSY)
    return sum(rule.tolerance for rule in rules if rule)


def _complexity(score: Score) -> int:
    """Number of knobs that are not as plain as can be; checkpointing is usual, and only memory."""
    own = score.candidate
    plain = Candidate(
        micro_batch_size=own.micro_batch_size, checkpointed_blocks=own.checkpointed_blocks
    )
    return sum(value != getattr(plain, name) for name, value in own)


def require_winner(
    scores: Sequence[Score], objective: Objective, relaxation: Callable[[], str]
) -> Score:
    """Choose the winner. Raises NothingFits if nothing runs; `relaxation` finds what helps."""
    best = choose_winner(scores, objective)
    if best is None:
        nearest = min(scores, key=lambda score: score.peak_memory_bytes, default=None)
        why = nearest.failure if nearest else None
        why = why or "every setting is predicted to need more than a run may take"
        raise NothingFits(f"nothing runs here: {why}", hint=relaxation())
    return best


def choose_fallbacks(scores: Sequence[Score], winner: Score) -> tuple[Candidate, ...]:
    """Choose what runs in less memory, the fastest first, each smaller than the last."""
    ladder = [winner]
    running = [score for score in scores if score.failure is None]
    for score in sorted(running, key=lambda s: (s.step_seconds, s.peak_memory_bytes)):
        if score.peak_memory_bytes < MAX_FALLBACK_SHARE * ladder[-1].peak_memory_bytes:
            ladder.append(score)
    return tuple(score.candidate for score in ladder[1 : MAX_FALLBACKS + 1])


def explain_choice(
    knob: str, space: SearchSpace, scores: Sequence[Score], own: Score, objective: Objective
) -> Reason:
    """Give the reason of a knob: what was chosen, and what spoke against every other value."""
    chosen: Choice = getattr(own.candidate, knob)
    others = _others(knob, chosen, space, scores)
    best = {choice: _best_with(knob, choice, scores, objective) for choice in others}
    ran = {chosen, *(choice for choice, score in best.items() if score)}
    # Of what ran, a conflict is no reason.
    rejected = [item for item in space.rejected[knob] if item.choice not in ran]
    if knob in COMPOSED:  # of numbers that the same speaks against, the first stands for all
        rejected = list({item.reason: item for item in reversed(rejected)}.values())[::-1]
    explained = {item.choice for item in rejected}
    for choice, score in best.items():
        if choice not in explained:
            rejected.append(Rejected(choice=choice, reason=_compare(score, own)))
    compared = [score for score in best.values() if score]
    if not others:
        why = "the only value that is searched here"
    elif not compared:
        why = "its alternatives were not tried: trials went to what promised more"
    else:
        why = f"part of the {GOALS[objective]} settings that run"
        limit = own.value(objective)
        if any(score.value(objective) < limit for score in compared if not score.failure):
            order = "what is more exact, then less system RAM, then simpler"
            why += f", within {TIE:.0%}: such ties go to {order}"
    return Reason(knob=knob, chosen=chosen, why=why, rejected=tuple(rejected))


def _others(knob: str, chosen: Choice, space: SearchSpace, scores: Sequence[Score]) -> list[Choice]:
    seen = {getattr(score.candidate, knob) for score in scores}
    if knob in COMPOSED:
        return [*sorted(nearest_numbers(seen, chosen), reverse=True)]
    tried = [choice for choice in space.tried_choices[knob] if choice in seen]
    known = dict.fromkeys((*space.choices[knob], *tried))
    return [choice for choice in known if choice != chosen]


def _best_with(
    knob: str, choice: Choice, scores: Sequence[Score], objective: Objective
) -> Score | None:
    having = [score for score in scores if getattr(score.candidate, knob) == choice]
    smallest = min(having, key=lambda score: score.peak_memory_bytes, default=None)
    return choose_winner(having, objective) or smallest


def _compare(best: Score | None, winner: Score) -> str:
    if best is None:
        return "not tried: it did not promise to be better"
    if best.failure:
        return f"{best.failure} ({label_of(dict(best.candidate))})"
    time = f"{best.step_seconds / winner.step_seconds:.2f}x the step time"
    memory = f"{best.peak_memory_bytes / winner.peak_memory_bytes:.2f}x the memory"
    return f"at best {time} at {memory} ({label_of(dict(best.candidate))})"


def confirm_winner(
    trials: Trials, problem: PlanningProblem, rehearse: Callable[[Candidate], TrialResult | None]
) -> Trials:
    """Add longer trials: the winner's, and if it loses by that, of what wins instead."""
    objective = problem.workload.objective
    confirmed = 0
    while confirmed < MAX_CONFIRMATIONS:
        best = choose_winner(score_trials(trials), objective)
        tried = {trial.candidate for trial in trials if trial.confirms}
        known = [score for score in score_finalists(trials) if score.candidate in tried]
        if sure := choose_winner(known, objective):  # then the rival that is next to it
            others = [s for s in score_trials(trials) if s.candidate not in tried and not s.failure]
            best = min(others, key=lambda score: score.value(objective), default=None)
        if best is None or best.candidate in tried:
            break
        share = 1 + TIE if confirmed == 1 else WORTH_CONFIRMING
        if sure and best.value(objective) > share * sure.value(objective):
            break
        longer = rehearse(best.candidate)
        if longer is None:
            break
        trials = (*trials, longer)
        confirmed += longer.outcome == "ok"
    return trials


def choose_untried_fallback(trials: Trials, problem: PlanningProblem) -> Candidate | None:
    """Choose the fastest untried that is predicted to be smaller, if none smaller ran."""
    scores = score_trials(trials)
    best = choose_winner(scores, problem.workload.objective)
    if best is None or choose_fallbacks(scores, best):
        return None
    cost = problem.cost.with_calibration(trials)
    tried = {trial.candidate for trial in trials}
    untried = [candidate for candidate in problem.space.candidates if candidate not in tried]
    max_bytes = MAX_UNTRIED_SHARE * cost.predict(best.candidate).run_memory_bytes
    fitting = [each for each in map(cost.predict, untried) if each.run_memory_bytes <= max_bytes]
    fastest = min(fitting, key=lambda prediction: prediction.step_seconds, default=None)
    return fastest.candidate if fastest else None


@dataclass(frozen=True)
class Payback:
    """Time that compiling saves and takes, measured or predicted."""

    saved_seconds: float  # of a step; negative if compiled steps are slower
    startup_seconds: float
    num_steps: int

    @property
    def pays(self) -> bool:
        return self.num_steps * self.saved_seconds > self.startup_seconds

    def __str__(self) -> str:
        if self.saved_seconds <= 0:
            return f"steps become {-self.saved_seconds:.3g} s slower"
        minutes = f"{self.num_steps * self.saved_seconds / 60:.1f} min in {self.num_steps} steps"
        saved = f"{self.saved_seconds:.3g} s a step, {minutes}"
        return f"saves {saved}, and takes {self.startup_seconds:.3g} s to start"


def measured_payback(
    trials: Sequence[TrialResult], compiled: TrialResult, num_steps: int
) -> Payback | None:
    """Compare with the fastest plain trial; the start-up is what warm-up took beyond steps."""
    steady = [trial.median_step_seconds or 0.0 for trial in trials if _is_plain(trial)]
    own = compiled.median_step_seconds
    if own is None or not steady:
        return None
    startup = max(0.0, sum(compiled.warmup_seconds) - len(compiled.warmup_seconds) * own)
    return Payback(min(steady) - own, startup, num_steps)


def predicted_payback(
    cost: CostModel, plain: Candidate, compiled: Candidate, num_steps: int
) -> Payback:
    """Compare by the cost model."""
    saved = cost.predict(plain).step_seconds - cost.predict(compiled).step_seconds
    return Payback(saved, startup_seconds(compiled, cost.context), num_steps)


def choose_compiled(trials: Trials, problem: PlanningProblem) -> Candidate | None:
    """Choose the fastest settings compiled, if time is the objective and they pay."""
    if problem.workload.objective != "throughput":
        return None
    plain = sorted(filter(_is_plain, trials), key=lambda trial: trial.median_step_seconds or 0.0)
    cost = problem.cost.with_calibration(trials)
    compiled = (compiled_from(trial.candidate, problem) for trial in plain)
    predictions = [cost.predict(candidate) for candidate in compiled if candidate]
    fitting = [each for each in predictions if each.run_memory_bytes <= problem.budget_bytes]
    if not fitting:
        return None
    best = min(fitting, key=lambda prediction: prediction.step_seconds).candidate
    payback = predicted_payback(cost, plain[0].candidate, best, problem.job.num_steps)
    return best if payback.pays else None


def compiled_from(plain: Candidate, problem: PlanningProblem) -> Candidate | None:
    """Compile the settings, without what does not go with that; None if they cannot be."""
    compiled = plain.changed(
        compile=BLOCK,
        norm_rope="stock",
        modulation="resident",
        checkpointed_blocks=plain.recomputed_blocks,
        selective_blocks=0,
    )
    is_barred = any(knob.why_not(compiled, problem.cost.context) for knob in KNOBS)
    return compiled if problem.space.admits(compiled) and not is_barred else None


def judge_payback(trials: Trials, num_steps: int, compiled: TrialResult) -> TrialResult:
    """Return a trial of compiled settings, `unpaid` if the planned steps do not pay its start."""
    payback = measured_payback(trials, compiled, num_steps)
    if compiled.outcome != "ok" or payback is None or payback.pays:
        return compiled
    return compiled.changed(outcome="unpaid", message=f"measured: {payback}")


def explain_compile(
    reasons: Sequence[Reason], trials: Trials, problem: PlanningProblem, chosen: Candidate
) -> tuple[Reason, ...]:
    """Give compiling its figures: measured if it was tried, else predicted."""
    if BLOCK not in problem.space.pinnable.get("compile", ()) or not trials:
        return tuple(reasons)
    steps, tried = problem.job.num_steps, [t for t in trials if t.candidate.compile == BLOCK]
    against = ""
    if chosen.compile == BLOCK:
        ran = [trial for trial in tried if trial.outcome == "ok"]
        why = f"measured: {measured_payback(trials, ran[-1], steps)}"
    elif tried:
        why, against = _COMPILED_IF, tried[-1].message or tried[-1].outcome
    elif problem.workload.objective != "throughput":
        why = f"part of the {GOALS[problem.workload.objective]} settings that run"
        against = "tried only where time is the objective: compiling takes time, and saves time"
    elif (compiled := compiled_from(chosen, problem)) is None:
        why = "part of the fastest settings that run"
        against = "does not go with the other settings"
    else:
        cost = problem.cost.with_calibration(trials)
        why = _COMPILED_IF
        against = f"predicted: {predicted_payback(cost, chosen, compiled, steps)}"
    rejected = (Rejected(choice=BLOCK, reason=against),) if against else ()
    return tuple(
        reason.changed(why=why, rejected=rejected) if reason.knob == "compile" else reason
        for reason in reasons
    )


def _is_plain(trial: TrialResult) -> bool:
    return trial.outcome == "ok" and trial.candidate.compile == OFF
