"""The whole algorithm on one screen: from a question and a machine to a frozen plan.

    model ──> workload ──> search space ──> trials, each chosen by what the last ones taught ──> winner ──> plan

Where the machine is not at hand (a GPU of the catalogue), predictions take the place of trials and the plan says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from autotune.hardware import shares_host_memory
from autotune.planning.alternatives import larger_batch_advice
from autotune.planning.backend import Surroundings
from autotune.planning.confirming import (
    LEAST_SECONDS,
    SHARE_OF_SEARCH,
    confirmed_winner,
    rehearsed_in_part,
    unverified_rung,
)
from autotune.planning.expectation import expected, planned_hardware
from autotune.planning.problem import Case, case_of
from autotune.planning.request import Question
from autotune.planning.resuming import kept_study
from autotune.runtime import interrupting
from autotune.schema import (
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
    freeze,
    frozen_plan,
    measured_scores,
    once,
    predicted_scores,
    promised_scores,
    reasons_for,
    require_winner,
    run_search,
    search_cost_seconds,
)
from autotune.sharing import NO_ADVICE, Advice, Survey, advise


@dataclass(frozen=True)
class PlanEvents:
    """Where progress is told."""

    on_machine: Callable[[HardwareProfile], None] = lambda hardware: None
    on_left_out: Callable[[tuple[str, ...]], None] = lambda lines: None
    on_space: Callable[[SearchSpace, Workload], None] = lambda space, workload: None
    on_note: Callable[[str], None] = lambda note: None
    on_survey: Callable[[Survey], None] = lambda survey: None
    on_start: Callable[[Candidate], None] = lambda candidate: None
    on_trial: Callable[[TrialResult], None] = lambda result: None
    on_predictions: Callable[[list[Prediction]], None] = lambda predictions: None
    on_doubt: Callable[[str], None] = lambda line: None
    """A shared record that trials here contradict."""
    on_calibration: Callable[[tuple[Residual | None, ...]], None] = lambda residuals: None
    """How far each trial of the plan was from its prediction."""


def make_plan(
    question: Question,
    hardware: HardwareProfile,
    events: PlanEvents | None = None,
    around: Surroundings | None = None,
) -> TrainingPlan:
    """Find the best settings for the question on this machine and freeze them.

    Several processes that name the same study share its trials, and all return the plan that the first of them froze.

    Raises:
        InvalidInput: the model or the data cannot be used, or the study is about another question or machine.
        NothingFits: no settings run here.
        AutotuneError: the study's storage failed.
    """
    events, around = events or PlanEvents(), around or Surroundings()
    case = case_of(question, hardware, around)
    events.on_machine(case.hardware)
    events.on_left_out(case.left_out)
    for note in case.notes:
        events.on_note(note)
    events.on_space(case.space, case.work_of_all)
    if not case.can_try:
        predictions = [case.cost.predict(candidate) for candidate in case.space.candidates]
        events.on_predictions(predictions)
        return _plan(case, around.autotune_version, predictions)
    # Killed by a signal, it would seem to have been taken down by what it tried.
    with interrupting(), kept_study(case, around.autotune_version, events.on_note) as study:
        settled = frozen_plan(study) if question.study else None
        if settled is None:
            advice = _advice(case, around, events)
            trials = _search(case, around, advice, study, events)
            if not advice.kept(trials):  # else a record has confirmed them
                trials = _confirmed(case, around, trials, study, events)
            own = _plan(case, around.autotune_version, (), trials, advice).model_dump_json()
            first = freeze(study, own)
            settled = first if question.study else own
    made = TrainingPlan.model_validate_json(settled)
    events.on_calibration(tuple(case.cost.residual(trial) for trial in made.frozen.trials))
    return made


def _advice(case: Case, around: Surroundings, events: PlanEvents) -> Advice:
    if not case.question.use_profiles:
        return NO_ADVICE
    found = around.survey(case.trained_on, case.workload)
    found, advice = advise(found, case.space.candidates, case.budget_bytes, case.workload, case.cost)
    events.on_survey(found)
    return advice


def _search(
    case: Case, around: Surroundings, advice: Advice, study: optuna.Study, events: PlanEvents
) -> tuple[TrialResult, ...]:
    question = case.question
    search = ResidualSearch(
        case.space,
        case.cost,
        case.budget_bytes,
        lessons=advice.lessons,
        first=advice.first,
        objective=case.workload.objective,
        ascending=shares_host_memory(case.hardware.device.memory_kind),
    )
    with around.trials(question.model, case.cost) as run:

        def tell_and_run(candidate: Candidate) -> TrialResult:
            events.on_start(candidate)
            return run(candidate)

        if around.tried is None:
            trials = run_search(search, tell_and_run, case.limits, events.on_trial, enough=advice.kept, study=study)
        else:
            trials = around.tried
            for trial in trials:
                events.on_trial(trial)
        over = around.tried is not None or advice.kept(trials)
        rung = None if over else unverified_rung(trials, case)
        result = once(study, "rung", rung, tell_and_run) if rung is not None else None
        if result is not None:
            trials = (*trials, result)
            events.on_trial(result)
    for doubt in advice.doubts(trials):
        events.on_doubt(doubt)
    return trials


def _confirmed(
    case: Case, around: Surroundings, trials: tuple[TrialResult, ...], study: optuna.Study, events: PlanEvents
) -> tuple[TrialResult, ...]:
    question = case.question
    seconds = max(LEAST_SECONDS, SHARE_OF_SEARCH * case.limits.allowed_seconds(best_seconds(trials)))

    def longer_trial(candidate: Candidate) -> TrialResult | None:
        events.on_start(candidate)
        return around.rehearse(question.model, case.cost, candidate, seconds)

    def rehearse(candidate: Candidate) -> TrialResult | None:
        longer = once(study, "rehearsal", candidate, longer_trial)
        if longer:
            events.on_trial(longer)
        return longer

    return confirmed_winner(trials, case, rehearse)


def _plan(
    case: Case,
    autotune_version: str,
    predictions: Sequence[Prediction],
    trials: tuple[TrialResult, ...] = (),
    advice: Advice = NO_ADVICE,
) -> TrainingPlan:
    """The best of what was tried here or, where nothing could be, of what was predicted."""
    objective = case.workload.objective
    scores = measured_scores(trials) if case.can_try else predicted_scores(predictions, case.budget_bytes)
    best = require_winner(promised_scores(trials) if trials else scores, objective, case.relaxation)
    scores += measured_scores(advice.evidence(trials))  # only what ran here may win
    caching, why_caching = case.cost.caching
    frozen = FrozenPart(
        schema_version=1,
        autotune_version=autotune_version,
        hardware=planned_hardware(case.hardware, case.cost.parallel),
        workload=case.work_of_all,
        settings=best.candidate,
        caching=caching,
        expected=expected(best, trials, case.cost, case.work_of_all, case.job, case.question.price_per_hour),
        reasons=(*reasons_for(case.space, scores, best, objective), why_caching),
        fallbacks=fallbacks_of(scores, best),
        records=advice.records,
        search_seconds=search_cost_seconds(trials),
        trials=trials,
        pins=case.question.pins,
        exclusions=case.question.exclusions,
        advice=(
            *rehearsed_in_part(trials, best.candidate),
            *larger_batch_advice(case.cost, best.candidate, best.step_seconds, case.budget_bytes),
        ),
    )
    return seal(case.job, frozen)
