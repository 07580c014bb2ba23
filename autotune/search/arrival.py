"""A predicted plan arrives at its machine: one trial tells whether its settings hold, and the plan
becomes measured. Only settings that the plan names are tried: the chosen ones, then its fallbacks,
each of which needs less memory than the one before."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.cost.memory import Parallel
from autotune.cost.predict import CostModel
from autotune.errors import DoesNotFit, InvalidPlan
from autotune.events import Notice, OnEvent, StatusChanged
from autotune.knobs import knob, registry
from autotune.models.resolve import read_parts, resolve_model
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.file import load_plan, save_plan, seal
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import FrozenPart, Reason, TrainingPlan
from autotune.plan.words import caching_text, setting_text
from autotune.search import expected, problem, winner
from autotune.search.next import search_cost_seconds
from autotune.search.trials import TrialFunction
from autotune.system.process import current_launch
from autotune.train.fit import key_misfits, require_fit, require_model

PLAN_AGAIN = "plan again on this machine: autotune plan --from PLAN"


def load_or_measure(
    plan: TrainingPlan, hardware: HardwareProfile, file: Path | None, on_event: OnEvent
) -> TrainingPlan:
    """Return the plan, or the measured one that a trial here makes of it, written next to `file`.
    With sharded weights it stays predicted: a trial has one device. Raises DoesNotFit."""
    if plan.frozen.expected.evidence == "measured" or plan.frozen.hardware.num_shards > 1:
        return plan
    known = load_measured(file, plan, hardware) if file else None
    if known is not None or current_launch() is not None:
        return known or plan
    on_event(StatusChanged(text="the plan was predicted: one trial tells whether it holds here"))
    measured = measure_prediction(plan, hardware)
    then, now = plan.frozen.expected, measured.frozen.expected
    text = f"measured here: {now.step_seconds:.3g} s per step, {then.step_seconds:.3g} predicted"
    if measured.frozen.settings != plan.frozen.settings:
        text += "; its settings did not run, a fallback does"
    if file:
        save_plan(measured, measured_path(file))
        text += f"; written to {measured_path(file)}"
    on_event(Notice(text=text))
    return measured


def load_measured(path: Path, plan: TrainingPlan, hardware: HardwareProfile) -> TrainingPlan | None:
    """Read the measured plan that an earlier start here made of the predicted one at `path`."""
    try:
        measured = load_plan(measured_path(path))
    except InvalidPlan:
        return None
    ours, theirs = measured.frozen, plan.frozen
    is_same_work = ours.workload == theirs.workload and ours.predicted_digest == plan.digest
    is_same_device = ours.hardware.device_name == hardware.device.name
    is_same_machine = is_same_device and ours.hardware.match_keys == hardware.match_keys
    return seal(plan.job, ours) if is_same_work and is_same_machine else None


def measured_path(path: Path) -> Path:
    """Name the file of the measured plan, next to the predicted one."""
    return path.with_name(f"{path.stem}.sealed{path.suffix}")


def measure_prediction(
    plan: TrainingPlan, hardware: HardwareProfile, backend: problem.PlannerBackend | None = None
) -> TrainingPlan:
    """Try a predicted plan's settings here, then its fallbacks. Raises DoesNotFit if none runs."""
    require_fit(key_misfits(plan, hardware))
    backend, model = backend or problem.PlannerBackend(), resolve_model(plan.job.model_ref)
    require_model(plan, model)
    planned, caching = plan.frozen.hardware, plan.frozen.caching
    work = plan.frozen.process_workload
    parallel = Parallel(planned.strategy, planned.num_processes)
    as_planned = Reason(knob="caching", chosen=caching_text(caching), why="as planned")
    cost = CostModel.build(
        hardware,
        work,
        model.family,
        model.config,
        read_parts(model),
        caching=(caching, as_planned),
        parallel=parallel,
    )
    candidates = (plan.frozen.settings, *plan.frozen.fallbacks)
    against = _find_misfits(candidates, cost)
    if fitting := [candidate for candidate in candidates if candidate not in against]:
        choices = {
            name: tuple({getattr(one, name): None for one in fitting})
            for name in registry.GRADIENT_TOLERANCES
        }
        context = knob.TuningContext(hardware, model.family, work)
        verdicts = backend.check_gradients(context, choices, model)
        wrong = {each.name: each.reason for each in verdicts if not each.available}
        found = {candidate: _find_wrong(candidate, wrong) for candidate in fitting}
        against |= {candidate: why for candidate, why in found.items() if why}
    usable = [candidate for candidate in candidates if candidate not in against]
    if not usable:
        last = f"the last: {against[candidates[-1]]}"
        what = f"neither the plan's settings nor its fallbacks can be used here; {last}"
        raise DoesNotFit(what, hint=PLAN_AGAIN)
    with backend.trials(model, cost) as run:
        trials = _until_one_runs(usable, run)
    return seal(plan.job, _measured(plan, cost, trials, against))


def _find_misfits(candidates: Sequence[Candidate], cost: CostModel) -> dict[Candidate, str]:
    # an over-allocation can hang a machine
    budget, against = cost.budget_bytes, {}
    kind, lacks = cost.hardware.device.kind, cost.hardware.lacks
    for candidate in candidates:
        needed = cost.predict(candidate).run_memory_bytes
        if needed > budget:
            limit = f"a run may take {budget / 2**30:.1f} GiB"
            against[candidate] = f"needs {needed / 2**30:.1f} GiB, {limit}"
        for name, value in candidate:
            if why := registry.why_not_on(kind, lacks, name, value):
                against[candidate] = f"{setting_text(name, value)}: {why}"
                break
    return against


def _find_wrong(candidate: Candidate, wrong: Mapping[str, str]) -> str | None:
    for name, rule_of in registry.GRADIENT_TOLERANCES.items():
        value = getattr(candidate, name)
        rule = rule_of(value)
        why = rule and wrong.get(knob.gradient_capability(name, rule.checked_choice))
        if why:
            return f"{setting_text(name, value)}: {why}"
    return None


def _until_one_runs(candidates: Sequence[Candidate], run: TrialFunction) -> tuple[TrialResult, ...]:
    trials: list[TrialResult] = []
    for candidate in candidates:
        trials.append(run(candidate))
        if trials[-1].outcome == "ok":
            return tuple(trials)
    last = trials[-1]
    raise DoesNotFit(
        "neither the plan's settings nor its fallbacks run here; the last ended as "
        f"{last.outcome}: {last.message}",
        hint=PLAN_AGAIN,
    )


def _measured(
    plan: TrainingPlan,
    cost: CostModel,
    trials: tuple[TrialResult, ...],
    against: Mapping[Candidate, str],
) -> FrozenPart:
    frozen = plan.frozen
    best = winner.choose_winner(winner.score_trials(trials), frozen.workload.objective)
    assert best is not None  # the last trial ran
    failed = against.get(frozen.settings, f"{trials[0].outcome}: {trials[0].message}")
    after = (frozen.settings, *frozen.fallbacks).index(best.candidate)
    price, forecast = frozen.expected.price_per_hour, frozen.forecast
    return frozen.changed(
        hardware=expected.planned_hardware(cost),
        settings=best.candidate,
        expected=expected.build_expectation(best, trials, cost, frozen.workload, plan.job, price),
        reasons=tuple(_reason(reason, best.candidate, failed) for reason in frozen.reasons),
        fallbacks=frozen.fallbacks[after:],
        search_seconds=search_cost_seconds(trials),
        trials=trials,
        forecast=forecast and forecast.rebased(frozen.settings, best.candidate),
        predicted_digest=plan.digest,
        overheads=None,  # autotune's executor ran it
    )


def _reason(reason: Reason, settings: Candidate, failed: str) -> Reason:
    chosen = getattr(settings, reason.knob, reason.chosen)
    if chosen == reason.chosen:
        return reason
    why = f"the predicted settings do not run here ({failed}); this fallback does"
    return Reason(knob=reason.knob, chosen=chosen, why=why, rejected=reason.rejected)
