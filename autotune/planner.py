"""The whole algorithm on one screen: from a question and a machine to a frozen plan.

    model ──> workload ──> search space ──> trials, each chosen by what the last ones taught ──> winner ──> plan

Where the machine is not at hand (a GPU of the catalogue), predictions take the place of trials and the plan says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from autotune.cost.predict import Predictor
from autotune.errors import NothingFits
from autotune.families.resolve import ResolvedModel, resolve_model
from autotune.fit import KEY_NAMES
from autotune.knobs.base import Setting
from autotune.plan_file import seal
from autotune.planning.evidence import confirmed, confirmed_trials, records_to_stand_on, trials_of_same_work
from autotune.planning.freeze import expected, planned_hardware
from autotune.planning.outlook import larger_batch_advice, relaxation
from autotune.planning.question import Question, data_of, job_of
from autotune.planning.surroundings import Surroundings
from autotune.prediction import Prediction
from autotune.schema import (
    Candidate,
    Choice,
    FrozenPart,
    HardwareProfile,
    Job,
    TrainingPlan,
    TrialResult,
    Workload,
    digest_of,
)
from autotune.search.residual import ResidualSearch
from autotune.search.space import SearchSpace, search_space, without
from autotune.search.storage import opened_study, safe_words
from autotune.search.study import Limits, freeze, frozen_plan, run_search, search_cost_seconds
from autotune.search.winner import fallbacks_of, measured_scores, predicted_scores, reasons_for, require_winner
from autotune.sharing.query import Known, Survey, first_candidates
from autotune.training.describe import describe_workload
from autotune.weights.sources import open_source, weights_in


@dataclass(frozen=True)
class Events:
    """Where progress is told."""

    on_space: Callable[[SearchSpace, Workload], None] = lambda space, workload: None
    on_survey: Callable[[Survey], None] = lambda survey: None
    on_start: Callable[[Candidate], None] = lambda candidate: None
    on_trial: Callable[[TrialResult], None] = lambda result: None
    on_predictions: Callable[[list[Prediction]], None] = lambda predictions: None


@dataclass(frozen=True)
class _Case:
    """One question on one machine, with all that follows from it before anything is tried."""

    question: Question
    hardware: HardwareProfile
    workload: Workload
    space: SearchSpace
    cost: Predictor
    job: Job
    around: Surroundings

    @property
    def budget_bytes(self) -> int:
        return self.hardware.device.budget_bytes


def make_plan(
    question: Question,
    hardware: HardwareProfile,
    events: Events | None = None,
    around: Surroundings | None = None,
) -> TrainingPlan:
    """Find the best settings for the question on this machine and freeze them.

    Several processes that name the same study share its trials, and all return the plan that the first of them froze.

    Raises:
        InvalidInput: the model or the data cannot be used, or the study is about another question or machine.
        NothingFits: no settings run here.
        AutotuneError: the study's storage failed.
    """
    events, around = events or Events(), around or Surroundings()
    case = _case(question, hardware, around)
    events.on_space(case.space, case.workload)
    if not question.here:
        predictions = [case.cost.predict(candidate) for candidate in case.space.candidates]
        events.on_predictions(predictions)
        return _plan(case, predictions)
    with safe_words(question.study):
        study = opened_study(question.study, _identity(case))
        settled = frozen_plan(study)
        if settled is None:
            stood_on = _stood_on(case, events)
            trials = _search(case, stood_on, study, events)
            settled = freeze(study, _plan(case, (), trials, stood_on).model_dump_json())
    return TrainingPlan.model_validate_json(settled)


def list_choices(question: Question, hardware: HardwareProfile) -> SearchSpace:
    """What a search for the question could choose on this machine, and what it could not and why."""
    model = resolve_model(question.model)
    workload = describe_workload(model, data_of(question, model), question.wishes)
    return search_space(Setting(hardware, model.family, workload), question.pins, question.exclusions)


def _case(question: Question, hardware: HardwareProfile, around: Surroundings) -> _Case:
    model = resolve_model(question.model)
    if around.needs_weights:
        _require_weights_and_room(model, hardware)
    dataset = data_of(question, model)
    workload = describe_workload(model, dataset, question.wishes)
    space = search_space(Setting(hardware, model.family, workload), question.pins, question.exclusions)
    cost = Predictor(hardware, workload, model.family, model.config)
    space = _without_too_heavy(space, cost, hardware)
    return _Case(question, hardware, workload, space, cost, job_of(question, model, dataset), around)


def _identity(case: _Case) -> dict[str, str | None]:
    """All that must be equal where trials count for the same search."""
    model = {**dict(case.workload.model), "name": ""}  # folders may be called differently
    work = {**case.workload.model_dump(mode="json"), "model": model}
    choices: dict[str, object] = {name: list(values) for name, values in case.space.choices.items()}
    named = {KEY_NAMES.get(key, key): value for key, value in case.hardware.hard_keys.items()}
    return {
        **named,
        "device": case.hardware.device.name,
        "work": digest_of(work)[:23],
        "settings to choose from": digest_of(choices)[:23],
    }


def _stood_on(case: _Case, events: Events) -> tuple[Known, ...]:
    if not case.question.use_profiles:
        return ()
    found = case.around.survey(case.hardware, case.workload)
    events.on_survey(found)
    return records_to_stand_on(found, case.space)


def _search(case: _Case, stood_on: tuple[Known, ...], study: optuna.Study, events: Events) -> tuple[TrialResult, ...]:
    question, budget = case.question, case.budget_bytes
    search = ResidualSearch(
        case.space,
        case.cost,
        budget,
        elsewhere=trials_of_same_work(stood_on, case.workload),
        first=first_candidates(stood_on, case.space.candidates, budget),
        objective=case.workload.objective,
    )
    limits = Limits(question.max_trials, question.search_seconds, case.job.num_steps)
    with case.around.trials(question.model, case.hardware, case.workload) as run:

        def tell_and_run(candidate: Candidate) -> TrialResult:
            events.on_start(candidate)
            return run(candidate)

        def enough(results: Sequence[TrialResult]) -> bool:
            return confirmed(stood_on, results) is not None

        return run_search(search, tell_and_run, limits, events.on_trial, enough=enough, study=study)


def _plan(
    case: _Case,
    predictions: Sequence[Prediction],
    trials: tuple[TrialResult, ...] = (),
    stood_on: tuple[Known, ...] = (),
) -> TrainingPlan:
    """The best of what was tried here or, where nothing could be, of what was predicted."""
    objective = case.workload.objective
    scores = measured_scores(trials) if case.question.here else predicted_scores(predictions, case.budget_bytes)
    best = require_winner(scores, objective, lambda: relaxation(case.hardware, case.workload, case.space, case.cost))
    scores += measured_scores(confirmed_trials(stood_on, trials))  # only what ran here may win
    frozen = FrozenPart(
        schema_version=1,
        autotune_version=case.around.autotune_version,
        hardware=planned_hardware(case.hardware),
        workload=case.workload,
        settings=best.candidate,
        expected=expected(best, trials, case.cost, case.workload, case.hardware),
        reasons=reasons_for(case.space, scores, best, objective),
        fallbacks=fallbacks_of(scores, best),
        records=tuple(item.name for item in stood_on),
        search_seconds=search_cost_seconds(trials),
        trials=trials,
        pins=case.question.pins,
        exclusions=case.question.exclusions,
        advice=larger_batch_advice(case.cost, best.candidate, best.step_seconds, case.budget_bytes),
    )
    return seal(case.job, frozen)


def _without_too_heavy(space: SearchSpace, cost: Predictor, hardware: HardwareProfile) -> SearchSpace:
    """Leave out storages whose weights alone exceed the budget: nothing about them needs to be traced or tried."""
    budget = hardware.device.budget_bytes
    sizes = {c.quantization: cost.weight_bytes(c) for c in space.candidates}
    dropped: dict[Choice, str] = {
        name: f"its weights alone need {size / 2**30:.1f} GiB, a run may take {budget / 2**30:.1f} GiB"
        for name, size in sizes.items()
        if size > budget
    }
    if len(dropped) == len(sizes):
        least = min(dropped, key=lambda name: sizes[str(name)])
        hint = relaxation(hardware, cost.workload, space, cost)
        raise NothingFits(f"{cost.workload.model.name} as {least}: {dropped[least]}", hint=hint)
    return without(space, "quantization", dropped)


def _require_weights_and_room(model: ResolvedModel, hardware: HardwareProfile) -> None:
    if model.folder is not None:
        open_source(weights_in(model.folder / "transformer"))  # headers only: damage shows now, not in a trial
    elif hardware.device.kind == "cpu":
        spec = model.spec
        raise NothingFits(
            f"{spec.name} ({spec.num_parameters / 1e9:.1f}B parameters) cannot be tried here: this machine has no GPU",
            hint=f"plan for a GPU by name: autotune plan --model {model.family.name} --hardware nvidia-rtx-4090 "
            "(all: autotune probe --list)",
        )
