"""The winner is tried for longer before a plan promises anything, and so is the first rung of its fallback ladder.

Neither counts among `--max-trials`, the candidates that are chosen from: the longer trial repeats one of them, and the
rung is tried only where nothing smaller than the winner has run. Both count in what the plan says that the search cost;
the longer trial's steps take at most a tenth of `--search-time` on top of it.
"""

from collections.abc import Callable

from autotune.planning.problem import PlanningProblem
from autotune.schema import Candidate, TrialResult
from autotune.search import choose_fallbacks, choose_winner, score_finalists, score_trials

MOST_CONFIRMATIONS = 3
"""Winners that are tried for longer, should the first fail or turn out slower than the next."""
SHARE_OF_SEARCH = 0.1
"""Of the time that the search may take, for the steps of the longer trial."""
LEAST_SECONDS = 5.0
WORTH_A_LOOK = 0.95
"""Of the confirmed step time: another candidate whose short trial was not even that fast is not confirmed as well."""
SMALLER = 0.9
"""Memory of a fallback, as a share of the winner's, at most."""

Trials = tuple[TrialResult, ...]


def confirmed_winner(
    trials: Trials, problem: PlanningProblem, rehearse: Callable[[Candidate], TrialResult | None]
) -> Trials:
    """`trials` and the longer ones: the winner's, and where it loses by that, those of who wins instead."""
    objective = problem.workload.objective
    for _ in range(MOST_CONFIRMATIONS):
        best = choose_winner(score_trials(trials), objective)
        tried = {trial.candidate for trial in trials if trial.confirms}
        sure = choose_winner([score for score in score_finalists(trials) if score.candidate in tried], objective)
        if best is None or best.candidate in tried or (sure and best.step_seconds > WORTH_A_LOOK * sure.step_seconds):
            break
        longer = rehearse(best.candidate)
        if longer is None:
            break
        trials = (*trials, longer)
    return trials


def rehearsed_in_part(trials: Trials, best: Candidate) -> tuple[str, ...]:
    """What a plan has to say where a phase of its settings' run could not be rehearsed."""
    longer = [trial for trial in trials if trial.confirms and trial.outcome == "ok" and trial.candidate == best]
    return tuple(f"not all of a run could be rehearsed: {trial.message}" for trial in longer[-1:] if trial.message)


def unverified_rung(trials: Trials, problem: PlanningProblem) -> Candidate | None:
    """What to fall back on, where nothing smaller than the winner ran: the fastest that is predicted to be smaller."""
    scores = score_trials(trials)
    best = choose_winner(scores, problem.workload.objective)
    if best is None or choose_fallbacks(scores, best):
        return None
    problem.cost.calibrate(trials)
    tried = {trial.candidate for trial in trials}
    most = SMALLER * problem.cost.predict(best.candidate).required_memory_bytes
    safer = (problem.cost.predict(candidate) for candidate in problem.space.candidates if candidate not in tried)
    fitting = [prediction for prediction in safer if prediction.required_memory_bytes <= most]
    return min(fitting, key=lambda prediction: prediction.step_seconds).candidate if fitting else None
