"""The whole algorithm on one screen: from a question and a machine to a frozen plan.

    model ──> workload ──> search space ──> trials, each chosen by what the last ones taught ──> winner ──> plan

Where the machine is not at hand (a GPU of the catalog), predictions take the place of trials and the plan says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from autotune.hardware import shares_host_memory
from autotune.planning.alternatives import larger_batch_advice
from autotune.planning.backend import PlannerBackend
from autotune.planning.confirming import (
    LEAST_SECONDS,
    SHARE_OF_SEARCH,
    confirmed_winner,
    rehearsed_in_part,
    unverified_rung,
)
from autotune.planning.expectation import build_expectation, planned_hardware
from autotune.planning.problem import PlanningProblem, build_problem
from autotune.planning.request import PlanRequest
from autotune.planning.resuming import kept_study
from autotune.runtime import interrupt_on_signal
from autotune.schema import (
    SCHEMA_VERSION,
    Candidate,
    FrozenPart,
    HardwareProfile,
    Prediction,
    Residual,
    TrainingPlan,
    TrialResult,
    Workload,
    seal,
)
from autotune.search import (
    ResidualSearch,
    SearchSpace,
    best_seconds,
    fallbacks_of,
    frozen_plan,
    measured_scores,
    memoize,
    predicted_scores,
    promised_scores,
    publish_plan,
    reasons_for,
    require_winner,
    run_search,
    search_cost_seconds,
)
from autotune.sharing import NO_WARM_START, StoreMatches, WarmStart, build_warm_start


@dataclass(frozen=True)
class PlanEvents:
    """Where progress is told."""

    on_machine: Callable[[HardwareProfile], None] = lambda hardware: None
    on_left_out: Callable[[tuple[str, ...]], None] = lambda lines: None
    on_space: Callable[[SearchSpace, Workload], None] = lambda space, workload: None
    on_note: Callable[[str], None] = lambda note: None
    on_matches: Callable[[StoreMatches], None] = lambda find_matches: None
    on_start: Callable[[Candidate], None] = lambda candidate: None
    on_trial: Callable[[TrialResult], None] = lambda result: None
    on_predictions: Callable[[list[Prediction]], None] = lambda predictions: None
    on_doubt: Callable[[str], None] = lambda line: None
    """A shared record that trials here contradict."""
    on_calibration: Callable[[tuple[Residual | None, ...]], None] = lambda residuals: None
    """How far each trial of the plan was from its prediction."""


def make_plan(
    request: PlanRequest,
    hardware: HardwareProfile,
    events: PlanEvents | None = None,
    backend: PlannerBackend | None = None,
) -> TrainingPlan:
    """Find the best settings for the question on this machine and freeze them.

    Several processes that name the same study share its trials, and all return the plan that the first of them froze.

    Raises:
        InvalidInput: the model or the data cannot be used, or the study is about another question or machine.
        NothingFits: no settings run here.
        AutotuneError: the study's storage failed.
    """
    events, backend = events or PlanEvents(), backend or PlannerBackend()
    problem = build_problem(request, hardware, backend)
    events.on_machine(problem.hardware)
    events.on_left_out(problem.left_out)
    for note in problem.notes:
        events.on_note(note)
    events.on_space(problem.space, problem.global_workload)
    if not problem.can_try:
        predictions = [problem.cost.predict(candidate) for candidate in problem.space.candidates]
        events.on_predictions(predictions)
        return _plan(problem, backend.autotune_version, predictions)
    # Killed by a signal, it would seem to have been taken down by what it tried.
    with interrupt_on_signal(), kept_study(problem, backend.autotune_version, events.on_note) as study:
        settled = frozen_plan(study) if request.study else None
        if settled is None:
            advice = _advice(problem, backend, events)
            trials = _search(problem, backend, advice, study, events)
            if not advice.is_reproduced(trials):  # else a record has confirmed them
                trials = _confirmed(problem, backend, trials, study, events)
            own = _plan(problem, backend.autotune_version, (), trials, advice).model_dump_json()
            first = publish_plan(study, own)
            settled = first if request.study else own
    made = TrainingPlan.model_validate_json(settled)
    events.on_calibration(tuple(problem.cost.residual(trial) for trial in made.frozen.trials))
    return made


def _advice(problem: PlanningProblem, backend: PlannerBackend, events: PlanEvents) -> WarmStart:
    if not problem.request.use_profiles:
        return NO_WARM_START
    found = backend.find_matches(problem.device_profile, problem.workload)
    found, advice = build_warm_start(
        found, problem.space.candidates, problem.budget_bytes, problem.workload, problem.cost
    )
    events.on_matches(found)
    return advice


def _search(
    problem: PlanningProblem, backend: PlannerBackend, advice: WarmStart, study: optuna.Study, events: PlanEvents
) -> tuple[TrialResult, ...]:
    request = problem.request
    search = ResidualSearch(
        problem.space,
        problem.cost,
        problem.budget_bytes,
        priors=advice.priors,
        first=advice.first_candidates,
        objective=problem.workload.objective,
        ascending=shares_host_memory(problem.hardware.device.memory_kind),
    )
    with backend.trials(request.model, problem.cost) as run:

        def tell_and_run(candidate: Candidate) -> TrialResult:
            events.on_start(candidate)
            return run(candidate)

        if backend.tried is None:
            trials = run_search(
                search, tell_and_run, problem.limits, events.on_trial, enough=advice.is_reproduced, study=study
            )
        else:
            trials = backend.tried
            for trial in trials:
                events.on_trial(trial)
        over = backend.tried is not None or advice.is_reproduced(trials)
        rung = None if over else unverified_rung(trials, problem)
        result = memoize(study, "rung", rung, tell_and_run) if rung is not None else None
        if result is not None:
            trials = (*trials, result)
            events.on_trial(result)
    for doubt in advice.contradictions(trials):
        events.on_doubt(doubt)
    return trials


def _confirmed(
    problem: PlanningProblem,
    backend: PlannerBackend,
    trials: tuple[TrialResult, ...],
    study: optuna.Study,
    events: PlanEvents,
) -> tuple[TrialResult, ...]:
    request = problem.request
    seconds = max(LEAST_SECONDS, SHARE_OF_SEARCH * problem.limits.allowed_seconds(best_seconds(trials)))

    def longer_trial(candidate: Candidate) -> TrialResult | None:
        events.on_start(candidate)
        return backend.rehearse(request.model, problem.cost, candidate, seconds)

    def rehearse(candidate: Candidate) -> TrialResult | None:
        longer = memoize(study, "rehearsal", candidate, longer_trial)
        if longer:
            events.on_trial(longer)
        return longer

    return confirmed_winner(trials, problem, rehearse)


def _plan(
    problem: PlanningProblem,
    autotune_version: str,
    predictions: Sequence[Prediction],
    trials: tuple[TrialResult, ...] = (),
    advice: WarmStart = NO_WARM_START,
) -> TrainingPlan:
    """The best of what was tried here or, where nothing could be, of what was predicted."""
    objective = problem.workload.objective
    scores = measured_scores(trials) if problem.can_try else predicted_scores(predictions, problem.budget_bytes)
    best = require_winner(promised_scores(trials) if trials else scores, objective, problem.relaxation)
    scores += measured_scores(advice.evidence(trials))  # only what ran here may win
    caching, why_caching = problem.cost.caching
    frozen = FrozenPart(
        schema_version=SCHEMA_VERSION,
        autotune_version=autotune_version,
        hardware=planned_hardware(problem.hardware, problem.cost.parallel),
        workload=problem.global_workload,
        settings=best.candidate,
        caching=caching,
        expected=build_expectation(
            best, trials, problem.cost, problem.global_workload, problem.job, problem.request.price_per_hour
        ),
        reasons=(*reasons_for(problem.space, scores, best, objective), why_caching),
        fallbacks=fallbacks_of(scores, best),
        records=advice.records,
        search_seconds=search_cost_seconds(trials),
        trials=trials,
        pins=problem.request.pins,
        exclusions=problem.request.exclusions,
        advice=(
            *rehearsed_in_part(trials, best.candidate),
            *larger_batch_advice(problem.cost, best.candidate, best.step_seconds, problem.budget_bytes),
        ),
    )
    return seal(problem.job, frozen)
