"""The whole algorithm on one screen: from a request and a machine to a frozen plan.

    model ──> workload ──> search space ──> trials, each chosen by what the last ones taught ──> winner ──> plan

If the machine is not at hand (a GPU of the catalog), predictions take the place of trials and the
plan says so.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import optuna

from autotune.events import (
    CandidatesPredicted,
    Notice,
    OnEvent,
    Progressed,
    RecordsMatched,
    SearchSpaceBuilt,
    StatusChanged,
    TrialFinished,
    TrialStarted,
    ignore_event,
)
from autotune.knobs.knob import gradient_capability, why_not
from autotune.plan.base import SCHEMA_VERSION, digest_of
from autotune.plan.candidate import Candidate, Residual, TrialResult
from autotune.plan.file import parse_plan, seal
from autotune.plan.hardware import HardwareProfile, shares_host_memory
from autotune.plan.plan import FrozenPart, TrainingPlan
from autotune.plan.prediction import Prediction
from autotune.plan.request import PlanRequest
from autotune.search.expected import build_expectation, build_forecast, planned_hardware
from autotune.search.next import ResidualSearch, best_seconds, search_cost_seconds
from autotune.search.problem import (
    PlannerBackend,
    PlanningProblem,
    advise_larger_batch,
    suggest_relaxation,
)
from autotune.search.request import ResolvedRequest, resolve_request_model
from autotune.search.study import (
    TrialFunction,
    memoize,
    open_study,
    publish_plan,
    published_plan,
    run_search,
    take_snapshot,
)
from autotune.search.winner import (
    MIN_SECONDS,
    SHARE_OF_SEARCH,
    choose_fallbacks,
    choose_untried_fallback,
    confirm_winner,
    explain_choices,
    explain_compile,
    note_missing_phases,
    refuse_beyond,
    require_winner,
    score_finalists,
    score_predictions,
    score_trials,
    try_compiled,
)
from autotune.share.warm_start import NO_WARM_START, StoreMatches, WarmStart, build_warm_start
from autotune.system.files import cache_path, data_path
from autotune.system.process import collect_rarely, interrupt_on_signal

NO_MATCHES = StoreMatches(records=(), refused=())


@dataclass(frozen=True)
class PlanningResult:
    """A plan, with what the search learned that the plan does not hold: material for shared
    records."""

    plan: TrainingPlan
    hardware: HardwareProfile
    """The machine, with the capabilities that gradient checks have shown."""
    matches: StoreMatches = NO_MATCHES
    """Records of other searches that were found for this one."""
    residuals: tuple[Residual | None, ...] = ()
    """For each trial of the plan, how far it was from its prediction."""


class PlanInterrupted(KeyboardInterrupt):
    """A search was stopped by Ctrl-C or another signal after something ran; `plan` is the best of
    what it had tried.
    """

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__()
        self.plan = plan


@collect_rarely()
def make_plan(
    asked: PlanRequest | ResolvedRequest,
    hardware: HardwareProfile,
    on_event: OnEvent = ignore_event,
    backend: PlannerBackend | None = None,
) -> PlanningResult:
    """Find the best settings for the request on this machine and freeze them.

    Several processes that name the same study share its trials, and all return the plan that the
    first of them froze.

    Raises:
        InvalidInput: the model or the data cannot be used, or the study is about another request or
            machine.
        NothingFits: no settings run here.
        AutotuneError: the study's storage failed.
        PlanInterrupted, KeyboardInterrupt: the search was stopped after, or before, a trial ran. It
            can go on.
    """
    backend = backend or PlannerBackend()
    on_event(StatusChanged(text="reading model and data"))
    problem = PlanningProblem.build(asked, hardware, backend)
    for line in problem.left_out:
        on_event(Notice(text=line, level="warning"))
    for note in problem.notes:
        on_event(Notice(text=note))
    candidates = problem.space.candidates
    on_event(
        SearchSpaceBuilt(
            workload=problem.global_workload,
            num_candidates=len(candidates),
            max_trials=problem.limits.max_trials if problem.can_try else 0,
        )
    )
    if not problem.can_try:
        problem.cost.prepare(candidates)
        predictions = []
        for done, candidate in enumerate(candidates):
            on_event(Progressed(name="predicting", done=done, total=len(candidates)))
            predictions.append(problem.cost.predict(candidate))
        on_event(
            CandidatesPredicted(predictions=tuple(predictions), budget_bytes=problem.budget_bytes)
        )
        return PlanningResult(
            freeze_plan(problem, backend.autotune_version, predictions), problem.hardware
        )

    def on_note(note: str) -> None:
        on_event(Notice(text=note))

    matches = NO_MATCHES
    # Killed by a signal, it would seem to have been taken down by what it tried.
    with interrupt_on_signal(), _keep_study(problem, backend.autotune_version, on_note) as study:
        published = published_plan(study) if problem.request.study else None
        if published is not None:
            plan = parse_plan(published)
        else:
            matches, warm_start = _find_warm_start(problem, backend, on_event)
            try:
                trials = _search(problem, backend, warm_start, study, on_event)
                if not warm_start.is_reproduced(trials):
                    trials = _try_compiled(problem, backend, trials, study, on_event)
                # Phases are rehearsed here: those of another machine do not count.
                trials = _confirm(problem, backend, trials, study, on_event)
            except KeyboardInterrupt:
                known = take_snapshot(study).results
                if any(trial.outcome == "ok" for trial in known):
                    raise PlanInterrupted(
                        freeze_plan(problem, backend.autotune_version, (), known, warm_start)
                    ) from None
                raise
            for line in warm_start.contradictions(trials):
                on_event(Notice(text=line, topic="records"))
            plan = freeze_plan(problem, backend.autotune_version, (), trials, warm_start)
            first = publish_plan(study, plan.model_dump_json())
            if problem.request.study:
                plan = parse_plan(first)
    residuals = tuple(problem.cost.residual(trial) for trial in plan.frozen.trials)
    return PlanningResult(plan, problem.hardware, matches, residuals)


@contextmanager
def _keep_study(
    problem: PlanningProblem, autotune_version: str, on_note: Callable[[str], None]
) -> Iterator[optuna.Study]:
    """The study of this problem: under the user's name, else in a file in the cache folder, under
    the digest of request and machine, as an interrupted search left it."""
    request, device = problem.request, problem.hardware.device
    key: dict[str, object] = {
        **problem.identity,
        "autotune": autotune_version,  # what another version measured is measured again
        "model": str(request.model_ref),  # random weights and real ones fail in other ways
        "libraries": problem.hardware.versions.model_dump(mode="json"),
        "budget": device.budget_bytes if device.budget_set_by_user else None,
    }
    is_named, url = request.study is not None, request.storage
    path = cache_path("searches", f"{digest_of(key)[-32:]}.db")
    if url is None and (is_named or request.interrupted != "ignored"):
        path = data_path("studies.db") if is_named else path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            url = f"sqlite:///{path}"
        except OSError as error:
            on_note(f"trials are kept in memory only: {path.parent}: {error.strerror}")
    with ExitStack() as stack:
        name, is_fresh = request.study or "search", request.interrupted == "forgotten"
        asked = (url, name, problem.identity, not is_named, is_fresh)
        try:
            study = stack.enter_context(open_study(*asked))
        except Exception as error:
            if is_named or "locked" in str(error):
                raise
            path.unlink(missing_ok=True)  # damaged, or of another Optuna: it is measured again
            study = stack.enter_context(open_study(*asked))
        if not is_named and (number := len(take_snapshot(study).results)):
            known = "one trial" if number == 1 else f"{number} trials"
            on_note(f"an interrupted search continues: {known} known (--fresh forgets them)")
        yield study


def _find_warm_start(
    problem: PlanningProblem, backend: PlannerBackend, on_event: OnEvent
) -> tuple[StoreMatches, WarmStart]:
    if not problem.request.use_records:
        return NO_MATCHES, NO_WARM_START
    found = backend.find_matches(problem.hardware, problem.workload, problem.budget_bytes)
    found, warm_start = build_warm_start(
        found, problem.space.tried_choices, problem.budget_bytes, problem.cost
    )
    kind = found.records[0].match.kind if found.records else "none"
    on_event(RecordsMatched(kind=kind, num_records=len(found.records), refused=found.refused))
    return found, warm_start


def _search(
    problem: PlanningProblem,
    backend: PlannerBackend,
    warm_start: WarmStart,
    study: optuna.Study,
    on_event: OnEvent,
) -> tuple[TrialResult, ...]:
    request = problem.request
    search = ResidualSearch(
        problem.space,
        problem.cost,
        problem.budget_bytes,
        priors=warm_start.priors,
        first=warm_start.first_candidates,
        objective=problem.workload.objective,
        ascending=shares_host_memory(problem.hardware.device.memory_kind),
    )

    def on_trial(result: TrialResult) -> None:
        on_event(TrialFinished(result=result))

    with backend.trials(request.model_ref, problem.cost) as run:

        def run_trial(candidate: Candidate) -> TrialResult:
            on_event(TrialStarted(candidate=candidate))
            return run(candidate)

        trials = run_search(
            search,
            run_trial,
            problem.limits,
            on_trial,
            is_enough=warm_start.is_reproduced,
            study=study,
        )
        trials = _try_doubtful_again(search, trials, study, run_trial, on_trial)
        fallback = (
            None if warm_start.is_reproduced(trials) else choose_untried_fallback(trials, problem)
        )
        result = memoize(study, "fallback", fallback, run_trial) if fallback is not None else None
        if result is not None:
            trials = (*trials, result)
            on_trial(result)
    return trials


def _try_doubtful_again(
    search: ResidualSearch,
    trials: tuple[TrialResult, ...],
    study: optuna.Study,
    run_trial: TrialFunction,
    on_trial: Callable[[TrialResult], None],
) -> tuple[TrialResult, ...]:
    """The trials, each that contradicts the others replaced by a repetition if that is faster:
    noise only slows."""
    repeated: set[Candidate] = set()
    while (doubtful := search.find_doubtful(trials)) and doubtful.candidate not in repeated:
        repeated.add(doubtful.candidate)
        again = memoize(study, "again", doubtful.candidate, run_trial)
        if again is None or again.outcome != "ok":
            break
        on_trial(again)
        seconds = [trial.median_step_seconds or math.inf for trial in (again, doubtful)]
        if seconds[0] < seconds[1]:
            cost = (again.wall_seconds or 0.0) + (doubtful.wall_seconds or 0.0)
            kept = again.changed(wall_seconds=cost)
            trials = tuple(kept if trial is doubtful else trial for trial in trials)
    return trials


def _try_compiled(
    problem: PlanningProblem,
    backend: PlannerBackend,
    trials: tuple[TrialResult, ...],
    study: optuna.Study,
    on_event: OnEvent,
) -> tuple[TrialResult, ...]:
    """The trials, and those that decide whether the fastest settings are compiled."""

    def run(candidate: Candidate) -> TrialResult | None:
        request = problem.request
        model, _ = resolve_request_model(request)
        asked = {"precision": problem.space.choices["precision"], "compile": (candidate.compile,)}
        checked = backend.check_gradients(problem.cost.context, asked, model)
        wrong = why_not(checked, gradient_capability("compile", candidate.compile))
        if wrong:
            return TrialResult(candidate=candidate, outcome="numerics", message=wrong)
        on_event(TrialStarted(candidate=candidate))
        with backend.trials(
            request.model_ref, problem.cost
        ) as trial:  # in a process that has compiled nothing
            result = trial(candidate)
        on_event(TrialFinished(result=result))
        return result

    return try_compiled(
        trials, problem, lambda what, candidate: memoize(study, what, candidate, run)
    )


def _confirm(
    problem: PlanningProblem,
    backend: PlannerBackend,
    trials: tuple[TrialResult, ...],
    study: optuna.Study,
    on_event: OnEvent,
) -> tuple[TrialResult, ...]:
    request = problem.request
    seconds = max(
        MIN_SECONDS, SHARE_OF_SEARCH * problem.limits.allowed_seconds(best_seconds(trials))
    )

    def longer_trial(candidate: Candidate) -> TrialResult | None:
        on_event(TrialStarted(candidate=candidate))
        return backend.rehearse(request.model_ref, problem.cost, candidate, seconds)

    def rehearse(candidate: Candidate) -> TrialResult | None:
        longer = memoize(study, "rehearsal", candidate, longer_trial)
        if longer:
            on_event(TrialFinished(result=longer))
        return longer

    return confirm_winner(trials, problem, rehearse)


def freeze_plan(
    problem: PlanningProblem,
    autotune_version: str,
    predictions: Sequence[Prediction],
    trials: tuple[TrialResult, ...] = (),
    warm_start: WarmStart = NO_WARM_START,
) -> TrainingPlan:
    """The best of what was tried here or, where nothing could be, of what was predicted: a pure
    function, so that a plan's own trials give it again, byte for byte."""
    objective = problem.workload.objective
    scores = (
        score_trials(trials)
        if problem.can_try
        else score_predictions(predictions, problem.budget_bytes)
    )
    request, cost = problem.request, problem.cost.with_calibration(trials)

    def relaxation() -> str:
        taught = problem.cost.with_calibration(trials, warm_start.priors(trials))
        return suggest_relaxation(request, problem.space, taught)

    finalists = scores
    if trials:
        finalists = refuse_beyond(score_finalists(trials), cost, problem.budget_bytes)
    best = require_winner(finalists, objective, relaxation)
    tried = {trial.candidate: problem.cost.predict(trial.candidate) for trial in trials}
    candidates = dict.fromkeys((*problem.space.candidates, *tried))
    scores += score_trials(warm_start.evidence(trials))  # only what ran here may win
    frozen = FrozenPart(
        schema_version=SCHEMA_VERSION,
        autotune_version=autotune_version,
        hardware=planned_hardware(cost),
        workload=problem.global_workload,
        settings=best.candidate,
        caching=cost.caching,
        expected=build_expectation(
            best, trials, cost, problem.global_workload, problem.job, request.price_per_hour
        ),
        reasons=(
            *explain_compile(
                explain_choices(problem.space, scores, best, objective),
                trials,
                problem,
                best.candidate,
            ),
            cost.caching_reason,
        ),
        fallbacks=choose_fallbacks(scores, best),
        records=warm_start.records,
        search_seconds=search_cost_seconds(trials),
        trials=trials,
        pins=request.pin_pairs,
        exclusions=request.exclusion_pairs,
        overheads=request.overheads,
        forecast=build_forecast(
            predictions or [cost.predict(candidate) for candidate in candidates],
            best.candidate,
            problem.budget_bytes,
            problem.cost.predict_uncalibrated(best.candidate).step_time,
            tried,
        ),
        advice=(
            *note_missing_phases(trials, best.candidate),
            *advise_larger_batch(problem.space, cost, best.candidate, best.step_seconds),
        ),
    )
    return seal(problem.job, frozen)
