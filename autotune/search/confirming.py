"""The winner is tried for longer before a plan promises anything, and the first fallback is tried,
too.

Neither counts among `--max-trials`, the candidates that are chosen from: the longer trial repeats
one of them, and the fallback is tried only if nothing smaller than the winner has run. Both count
in what the plan says that the search cost; the longer trial's steps take at most a tenth of
`--search-time` on top of it.
"""

from collections.abc import Callable

from autotune.plan.candidate import Candidate
from autotune.plan.trial import TrialResult
from autotune.search.problem import PlanningProblem
from autotune.search.winner import choose_fallbacks, choose_winner, score_finalists, score_trials

MAX_CONFIRMATIONS = 3
"""Winners that are tried for longer, if the first turns out slower than the next; those that
fail do not count."""
SHARE_OF_SEARCH = 0.1
"""Share of the time that the search may take, for the steps of the longer trial."""
MIN_SECONDS = 5.0
WORTH_CONFIRMING = 0.95
"""Share of what the confirmed settings take of time, memory or energy, whichever is the
objective: a candidate whose short trial did not take even less is not confirmed as well."""
MAX_FALLBACK_SHARE = 0.9
"""Largest memory of a fallback, as a share of the winner's."""

Trials = tuple[TrialResult, ...]


def confirm_winner(
    trials: Trials, problem: PlanningProblem, rehearse: Callable[[Candidate], TrialResult | None]
) -> Trials:
    """`trials` and the longer ones: the winner's, and if it loses by that, those of the
    candidates that win instead."""
    objective = problem.workload.objective
    confirmed = 0
    while confirmed < MAX_CONFIRMATIONS:
        best = choose_winner(score_trials(trials), objective)
        tried = {trial.candidate for trial in trials if trial.confirms}
        sure = choose_winner(
            [score for score in score_finalists(trials) if score.candidate in tried], objective
        )
        if best is None or best.candidate in tried:
            break
        if sure and best.value(objective) > WORTH_CONFIRMING * sure.value(objective):
            break
        longer = rehearse(best.candidate)
        if longer is None:
            break
        trials = (*trials, longer)
        confirmed += longer.outcome == "ok"
    return trials


def note_missing_phases(trials: Trials, best: Candidate) -> tuple[str, ...]:
    """What a plan says if a phase of its settings' run could not be rehearsed."""
    longer = [
        trial
        for trial in trials
        if trial.confirms and trial.outcome == "ok" and trial.candidate == best
    ]
    return tuple(
        f"not all of a run could be rehearsed: {trial.message}"
        for trial in longer[-1:]
        if trial.message
    )


def choose_untried_fallback(trials: Trials, problem: PlanningProblem) -> Candidate | None:
    """The fastest untried candidate predicted to be smaller than the winner; None if something
    smaller has run."""
    scores = score_trials(trials)
    best = choose_winner(scores, problem.workload.objective)
    if best is None or choose_fallbacks(scores, best):
        return None
    cost = problem.cost.with_calibration(trials)
    tried = {trial.candidate for trial in trials}
    max_bytes = MAX_FALLBACK_SHARE * cost.predict(best.candidate).run_memory_bytes
    untried = (
        cost.predict(candidate) for candidate in problem.space.candidates if candidate not in tried
    )
    fitting = [prediction for prediction in untried if prediction.run_memory_bytes <= max_bytes]
    return (
        min(fitting, key=lambda prediction: prediction.step_seconds).candidate if fitting else None
    )
