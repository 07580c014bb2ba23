"""A predicted plan arrives at its machine: one trial tells whether its settings hold, and the plan becomes measured.

Only settings that the plan itself names are turned to: the chosen ones, then its fallbacks, each of which needs less
memory than the one before. Work, quality and effective batch stay as they are.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.cost.parallel import Parallel
from autotune.cost.predict import Predictor
from autotune.errors import DoesNotFit, InvalidPlan
from autotune.families.resolve import parts_of, resolve_model
from autotune.fit import key_misfits, model_misfits
from autotune.plan_file import read_plan, seal, write_plan
from autotune.planning.freeze import expected, planned_hardware
from autotune.planning.surroundings import Run, Surroundings
from autotune.schema import Candidate, FrozenPart, HardwareProfile, Reason, TrainingPlan, TrialResult
from autotune.search.study import search_cost_seconds, timed
from autotune.search.winner import measured_scores, winner_of
from autotune.training.prepare import require_fit
from autotune.training.processes import device_misfits

PLAN_AGAIN = "plan again on this machine: autotune plan --from PLAN"


def sealed_beside(path: Path, plan: TrainingPlan, hardware: HardwareProfile) -> TrainingPlan | None:
    """The measured plan that an earlier start on this machine made of the predicted one at `path`, if it did."""
    try:
        sealed = read_plan(sealed_path(path))
    except InvalidPlan:
        return None
    same_work = sealed.frozen.workload == plan.frozen.workload and sealed.frozen.predicted_digest == plan.digest
    same_machine = sealed.frozen.hardware.fingerprint == hardware.fingerprint
    same_device = sealed.frozen.hardware.device_name == hardware.device.name
    return seal(plan.job, sealed.frozen) if same_work and same_machine and same_device else None


def sealed_path(path: Path) -> Path:
    """Where the measured plan is written: beside the predicted one."""
    return path.with_name(f"{path.stem}.sealed{path.suffix}")


def seal_on_arrival(
    path: Path,
    plan: TrainingPlan,
    hardware: HardwareProfile,
    on_trial: Callable[[TrialResult], None] = lambda trial: None,
    around: Surroundings | None = None,
) -> TrainingPlan:
    """Try the settings of a predicted plan on this machine, turn to its fallbacks where they don't run, and write it.

    Raises:
        DoesNotFit: neither its settings nor its fallbacks run here.
    """
    require_fit((*key_misfits(plan, hardware), *device_misfits(plan.frozen.hardware.num_processes, hardware)))
    around, model = around or Surroundings(), resolve_model(plan.job.pinned_model)
    require_fit(model_misfits(plan, model.spec))
    planned = plan.frozen.hardware
    work = plan.frozen.workload.share(planned.num_processes)
    parallel = Parallel(planned.strategy, planned.num_processes)
    cost = Predictor(hardware, work, model.family, model.config, parts_of(model), parallel=parallel)
    candidates = _predicted_to_fit(plan, cost)
    with around.trials(plan.job.pinned_model, cost) as run:
        trials = _until_one_runs(candidates, run, on_trial)
    sealed = seal(plan.job, _measured(plan, cost, trials))
    write_plan(sealed_path(path), sealed)
    return sealed


def _predicted_to_fit(plan: TrainingPlan, cost: Predictor) -> list[Candidate]:
    """What may be tried: an over-allocation can hang a machine whose memory is shared."""
    budget = cost.hardware.device.budget_bytes
    candidates = (plan.frozen.settings, *plan.frozen.fallbacks)
    needed = {candidate: cost.predict(candidate).required_memory_bytes for candidate in candidates}
    fitting = [candidate for candidate in candidates if needed[candidate] <= budget]
    if not fitting:
        raise DoesNotFit(
            f"the plan's smallest settings need {min(needed.values()) / 2**30:.1f} GiB, a run may take "
            f"{budget / 2**30:.1f} GiB here",
            hint=PLAN_AGAIN,
        )
    return fitting


def _until_one_runs(
    candidates: Sequence[Candidate], run: Run, on_trial: Callable[[TrialResult], None]
) -> tuple[TrialResult, ...]:
    trials: list[TrialResult] = []
    for candidate in candidates:
        trials.append(timed(run, candidate))
        on_trial(trials[-1])
        if trials[-1].outcome == "ok":
            return tuple(trials)
    last = trials[-1]
    raise DoesNotFit(
        f"neither the plan's settings nor its fallbacks run here; the last ended as {last.outcome}: {last.message}",
        hint=PLAN_AGAIN,
    )


def _measured(plan: TrainingPlan, cost: Predictor, trials: tuple[TrialResult, ...]) -> FrozenPart:
    frozen = plan.frozen
    best = winner_of(measured_scores(trials), frozen.workload.objective)
    assert best is not None  # the last trial ran
    after = (frozen.settings, *frozen.fallbacks).index(best.candidate)
    return FrozenPart.model_validate(
        {
            **dict(frozen),
            "hardware": planned_hardware(cost.hardware, cost.parallel),
            "settings": best.candidate,
            "expected": expected(best, trials, cost, frozen.workload, plan.job, frozen.expected.price_per_hour),
            "reasons": tuple(_reason(reason, plan, best.candidate, trials[0]) for reason in frozen.reasons),
            "fallbacks": frozen.fallbacks[after:],
            "search_seconds": search_cost_seconds(trials),
            "trials": trials,
            "predicted_digest": plan.digest,
        }
    )


def _reason(reason: Reason, plan: TrainingPlan, settings: Candidate, first: TrialResult) -> Reason:
    chosen = getattr(settings, reason.knob, reason.chosen)
    if chosen == reason.chosen:
        return reason
    ran = first.candidate == plan.frozen.settings and first.outcome != "ok"
    failed = f"{first.outcome}: {first.message}" if ran else "they need more memory than a run may take"
    why = f"the predicted settings do not run here ({failed}); this fallback does"
    return Reason(knob=reason.knob, chosen=chosen, why=why, rejected=reason.rejected)
