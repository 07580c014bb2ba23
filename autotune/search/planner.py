"""The whole algorithm on one screen, `make_plan`: from a request and a machine to a frozen plan.

    request ──> search space ──> trials, each chosen by what the last taught ──> winner ──> plan

If the machine is not at hand (a GPU of the catalog), predictions take the place of trials and the
plan says so.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import optuna

from autotune import events
from autotune.plan import base, prediction
from autotune.plan.candidate import Candidate, Residual, TrialResult
from autotune.plan.file import seal
from autotune.plan.hardware import HardwareProfile, shares_host_memory
from autotune.plan.plan import FrozenPart, TrainingPlan
from autotune.plan.request import PlanRequest
from autotune.search import expected, winner
from autotune.search.next import MIN_GAIN, ResidualSearch, best_seconds, search_cost_seconds
from autotune.search.problem import PlannerBackend, PlanningProblem, advise_choices, hint_to_fit
from autotune.search.request import ResolvedRequest
from autotune.search.study import memoize, open_study, publish_plan, published_plan, run_search
from autotune.search.trials import TrialFunction
from autotune.share.store import shareable_machine
from autotune.share.warm_start import MatchedRecord, WarmStart
from autotune.system.process import collect_rarely, interrupt_on_signal


@dataclass(frozen=True)
class PlanningResult:
    """A plan, and for each of its trials how far it was from its prediction."""

    plan: TrainingPlan
    residuals: tuple[Residual | None, ...] = ()


class PlanInterrupted(KeyboardInterrupt):
    """A search was stopped after something ran; `plan` is the best of what it had tried."""

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__()
        self.plan = plan


@collect_rarely()
def make_plan(
    asked: PlanRequest | ResolvedRequest,
    hardware: HardwareProfile,
    on_event: events.OnEvent = base.log_event,
    backend: PlannerBackend | None = None,
) -> PlanningResult:
    """Find the best settings for the request on this machine and freeze them.

    Processes that name the same study share its trials, and all return the plan that the first of
    them froze. Raises PlanInterrupted if the search was stopped after a trial ran (it can go on),
    and errors as `PlanningProblem.build` and `open_study`.
    """
    backend = backend or PlannerBackend()
    on_event(events.StatusChanged(text="reading model and data"))
    problem = PlanningProblem.build(asked, hardware, backend)
    _announce(problem, on_event)
    version, is_named = backend.autotune_version, problem.request.study is not None
    if not problem.can_try:
        start, predicted = start_from(problem), _predict_all(problem, on_event)
        return PlanningResult(freeze_plan(problem, version, predicted, (), start))
    # Killed by a signal, it would seem to have been taken down by what it tried.
    with interrupt_on_signal(), open_study(problem, version, on_event) as study:
        plan = published_plan(study) if is_named else None
        if plan is None:
            warm_start = _find_warm_start(problem, backend, on_event)
            search = _Search(problem, backend, study, on_event)
            try:
                trials = search.explore(warm_start)
                theirs = warm_start.evidence(trials)
                if all(trial.candidate.compile == "off" for trial in theirs):
                    trials = search.try_compiled(trials)
                trials = search.confirm(trials)  # here: phases of another machine do not count
            except KeyboardInterrupt:
                known = winner.mark_disturbed(tuple(search.told))
                if not any(trial.outcome == "ok" for trial in known):
                    raise
                best = freeze_plan(problem, version, (), known, warm_start)
                raise PlanInterrupted(best) from None
            for line in warm_start.contradictions(trials):
                on_event(events.Notice(text=line, topic="records"))
            plan = freeze_plan(problem, version, (), trials, warm_start)
            published = publish_plan(study, plan)
            plan = published if is_named else plan
    return PlanningResult(plan, tuple(map(problem.cost.residual, plan.frozen.trials)))


def _announce(problem: PlanningProblem, on_event: events.OnEvent) -> None:
    for line in problem.left_out:
        on_event(events.Notice(text=line, level="warning"))
    for note in problem.notes:
        on_event(events.Notice(text=note))
    on_event(
        events.SearchSpaceBuilt(
            workload=problem.global_workload,
            num_candidates=len(problem.space.candidates),
            max_trials=problem.limits.max_trials if problem.can_try else 0,
        )
    )


def _predict_all(problem: PlanningProblem, on_event: events.OnEvent) -> list[prediction.Prediction]:
    candidates, predictions = problem.space.candidates, []
    problem.cost.prepare(candidates)
    for done, candidate in enumerate(candidates):
        on_event(events.Progressed(name="predicting", done=done, total=len(candidates)))
        predictions.append(problem.cost.predict(candidate))
    return predictions


def start_from(problem: PlanningProblem, records: Sequence[MatchedRecord] = ()) -> WarmStart:
    """Return what records contribute to the search of a problem."""
    space, cost = problem.space, problem.cost
    return WarmStart(tuple(records), space.tried_choices, problem.budget_bytes, cost)


def _find_warm_start(
    problem: PlanningProblem, backend: PlannerBackend, on_event: events.OnEvent
) -> WarmStart:
    if not problem.request.use_records:
        return start_from(problem)
    here = shareable_machine(problem.hardware, problem.budget_bytes)
    found = backend.find_matches(here, problem.workload)
    warm_start = start_from(problem, found.records)
    sources = warm_start.sources
    kind = sources[0].match.kind if sources else "none"
    on_event(events.RecordsMatched(kind=kind, num_records=len(sources), refused=found.refused))
    return warm_start


@dataclass(frozen=True)
class _Search:
    problem: PlanningProblem
    backend: PlannerBackend
    study: optuna.Study
    on_event: events.OnEvent
    told: list[TrialResult] = field(default_factory=list)
    """Trials, in the order in which listeners and the plan number it."""

    def explore(self, warm_start: WarmStart) -> winner.Trials:
        problem, study = self.problem, self.study
        sampler = ResidualSearch(
            problem.space,
            problem.cost,
            problem.budget_bytes,
            priors=warm_start.priors,
            first=warm_start.first_candidates,
            objective=problem.workload.objective,
            ascending=shares_host_memory(problem.hardware.device.memory_kind),
        )
        with self.backend.trials(problem.model, problem.cost) as run:

            def run_trial(candidate: Candidate) -> TrialResult:
                self.on_event(events.TrialStarted(candidate=candidate))
                return run(candidate)

            def is_enough(results: Sequence[TrialResult]) -> bool:
                theirs = warm_start.evidence(results)  # none unless a record is reproduced
                best = best_seconds(results)
                is_best = best * (1 - MIN_GAIN) <= best_seconds(theirs)
                return bool(theirs) and is_best and sampler.is_settled((*results, *theirs))

            trials = run_search(
                sampler, run_trial, problem.limits, self.tell, is_enough=is_enough, study=study
            )
            trials = self.try_doubtful_again(sampler, trials, run)
            if is_enough(trials):
                return trials
            fallback = winner.choose_untried_fallback(trials, problem)
            result = self.try_once("fallback", fallback, run) if fallback else None
        return (*trials, result) if result else trials

    def try_doubtful_again(
        self, sampler: ResidualSearch, trials: winner.Trials, run: TrialFunction
    ) -> winner.Trials:
        repeated: set[Candidate] = set()
        while (doubtful := sampler.find_doubtful(trials)) and doubtful.candidate not in repeated:
            repeated.add(doubtful.candidate)
            number = trials.index(doubtful) + 1
            text = f"trial {number} is slower than the others suggest: trying it again"
            self.on_event(events.Notice(text=text))
            again = self.try_once("again", doubtful.candidate, run)
            trials = winner.mark_disturbed((*trials, *filter(None, (again,))))
        return trials

    def try_compiled(self, trials: winner.Trials) -> winner.Trials:
        """Add a trial of the fastest settings compiled if that promises to pay, and another if an
        empty cache made its start too long: the next process finds the code of the first."""
        num_steps = self.problem.job.num_steps
        candidate = winner.choose_compiled(trials, self.problem)
        if candidate is None:
            return trials
        judge = partial(winner.judge_payback, trials, num_steps)
        for what in ("compiled", "compiled again"):
            found = self.try_once(what, candidate, self._run_compiled, judge)
            if found is None:
                break
            trials = (*trials, found)
            payback = winner.measured_payback(trials, found, num_steps)
            if found.outcome != "unpaid" or payback is None or payback.saved_seconds <= 0:
                break
        return trials

    def _run_compiled(self, candidate: Candidate) -> TrialResult:
        problem, backend = self.problem, self.backend
        choices = {"precision": problem.space.choices["precision"], "compile": (candidate.compile,)}
        started = time.monotonic()
        verdicts = backend.check_gradients(problem.cost.context, choices, problem.model)
        seconds = round(time.monotonic() - started, 1)
        if wrong := next((each for each in verdicts if not each.available), None):
            return TrialResult(
                candidate=candidate,
                outcome=wrong.outcome or "numerics",
                message=wrong.reason,
                wall_seconds=seconds,
            )
        with backend.trials(problem.model, problem.cost) as run:
            result = run(candidate)
        return result.changed(wall_seconds=(result.wall_seconds or 0.0) + seconds)

    def confirm(self, trials: winner.Trials) -> winner.Trials:
        problem = self.problem
        allowed = problem.limits.allowed_seconds(best_seconds(trials))
        seconds = max(winner.MIN_REHEARSAL_SECONDS, winner.SHARE_OF_SEARCH * allowed)

        def rehearse(candidate: Candidate) -> TrialResult | None:
            return self.backend.rehearse(problem.model, problem.cost, candidate, seconds)

        try_phases = partial(self.try_once, "rehearsal", run=rehearse)
        return winner.confirm_winner(trials, problem, try_phases)

    def try_once(
        self,
        what: str,
        candidate: Candidate,
        run: Callable[[Candidate], TrialResult | None],
        judge: Callable[[TrialResult], TrialResult] = lambda result: result,
    ) -> TrialResult | None:

        def measure() -> TrialResult | None:
            self.on_event(events.TrialStarted(candidate=candidate))
            return run(candidate)

        key = f"{what} {base.digest_of(candidate.model_dump(mode='json'))[-16:]}"
        measured = memoize(self.study, key, measure)
        return self.tell(judge(measured)) if measured else None

    def tell(self, result: TrialResult) -> TrialResult:
        self.told.append(result)
        self.on_event(events.TrialFinished(result=result))
        return result


def freeze_plan(
    problem: PlanningProblem,
    autotune_version: str,
    predictions: Sequence[prediction.Prediction],
    trials: winner.Trials,
    warm_start: WarmStart,
) -> TrainingPlan:
    """Choose the best of what was tried here or, where nothing could be, of what was predicted.
    Pure: a plan's own trials give it again, byte for byte."""
    objective, space = problem.workload.objective, problem.space
    request, cost = problem.request, problem.cost.with_calibration(trials)

    def relaxation() -> str:
        taught = problem.cost.with_calibration(trials, warm_start.priors(trials))
        return hint_to_fit(request, space, taught)

    if problem.can_try:
        scores = finalists = winner.score_trials(trials)
    else:
        scores = finalists = winner.score_predictions(predictions, problem.budget_bytes)
    if trials:
        finalists = winner.score_finalists(trials)
        finalists = winner.refuse_beyond(finalists, cost, problem.budget_bytes)
    best = winner.require_winner(finalists, objective, relaxation)
    settings = best.candidate
    tried = {trial.candidate: problem.cost.predict(trial.candidate) for trial in trials}
    candidates = dict.fromkeys((*space.candidates, *tried))
    scores += winner.score_trials(warm_start.evidence(trials))  # only what ran here may win
    reasons = tuple(
        winner.explain_choice(name, space, scores, best, objective) for name in space.rejected
    )
    reasons = winner.explain_compile(reasons, trials, problem, settings)
    frozen = FrozenPart(
        schema_version=base.SCHEMA_VERSION,
        autotune_version=autotune_version,
        hardware=expected.planned_hardware(cost),
        workload=problem.global_workload,
        settings=settings,
        caching=cost.caching,
        expected=expected.build_expectation(
            best, trials, cost, problem.global_workload, problem.job, request.price_per_hour
        ),
        reasons=(*reasons, cost.caching_reason),
        fallbacks=winner.choose_fallbacks(scores, best),
        records=tuple(source.name for source in warm_start.sources),
        search_seconds=problem.check_seconds + search_cost_seconds(trials),
        trials=trials,
        pins=request.pin_pairs,
        exclusions=tuple(p for p in request.exclusion_pairs if p not in request.lacking),
        max_memory_bytes=request.memory_limits[0],
        reserve_memory_bytes=request.memory_limits[1],
        overheads=request.overheads,
        forecast=expected.build_forecast(
            predictions or [cost.predict(candidate) for candidate in candidates],
            best,
            problem.budget_bytes,
            problem.cost.predict_uncalibrated(settings).step_time,
            tried.values(),
        ),
        advice=advise_choices(space, cost, settings, best.step_seconds),
    )
    return seal(problem.job, frozen)
