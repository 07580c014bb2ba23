"""A predicted plan arrives at its machine: one trial tells whether its settings hold, and the plan becomes measured.

Only settings that the plan itself names are turned to: the chosen ones, then its fallbacks, each of which needs less
memory than the one before. Work, quality and effective batch stay as they are.
"""

from collections.abc import Callable
from pathlib import Path

from autotune.cost.predict import Predictor
from autotune.errors import DoesNotFit, InvalidPlan
from autotune.families.resolve import parts_of, resolve_model
from autotune.plan_file import read_plan, seal, write_plan
from autotune.planning.freeze import expected, planned_hardware
from autotune.planning.surroundings import Run, Surroundings
from autotune.schema import FrozenPart, HardwareProfile, Reason, TrainingPlan, TrialResult
from autotune.search.study import search_cost_seconds
from autotune.search.winner import measured_scores, winner_of


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
    around = around or Surroundings()
    with around.trials(plan.job.model, hardware, plan.frozen.workload) as run:
        trials = _until_one_runs(plan, run, on_trial)
    sealed = seal(plan.job, _measured(plan, hardware, trials))
    write_plan(sealed_path(path), sealed)
    return sealed


def _until_one_runs(plan: TrainingPlan, run: Run, on_trial: Callable[[TrialResult], None]) -> tuple[TrialResult, ...]:
    trials: list[TrialResult] = []
    for candidate in (plan.frozen.settings, *plan.frozen.fallbacks):
        trials.append(run(candidate))
        on_trial(trials[-1])
        if trials[-1].outcome == "ok":
            return tuple(trials)
    last = trials[-1]
    raise DoesNotFit(
        f"neither the plan's settings nor its fallbacks run here; the last ended as {last.outcome}: {last.message}",
        hint="plan again on this machine: autotune plan --from PLAN",
    )


def _measured(plan: TrainingPlan, hardware: HardwareProfile, trials: tuple[TrialResult, ...]) -> FrozenPart:
    frozen, model = plan.frozen, resolve_model(plan.job.model)
    best = winner_of(measured_scores(trials), frozen.workload.objective)
    assert best is not None  # the last trial ran
    cost = Predictor(hardware, frozen.workload, model.family, model.config, parts_of(model))
    return FrozenPart.model_validate(
        {
            **dict(frozen),
            "hardware": planned_hardware(hardware),
            "settings": best.candidate,
            "expected": expected(best, trials, cost),
            "reasons": tuple(_reason(reason, best.candidate, trials) for reason in frozen.reasons),
            "fallbacks": frozen.fallbacks[len(trials) - 1 :],
            "search_seconds": search_cost_seconds(trials),
            "trials": trials,
            "predicted_digest": plan.digest,
        }
    )


def _reason(reason: Reason, settings: object, trials: tuple[TrialResult, ...]) -> Reason:
    chosen = getattr(settings, reason.knob)
    if chosen == reason.chosen:
        return reason
    failed = trials[0]
    why = f"the predicted settings did not run here ({failed.outcome}: {failed.message}); this fallback did"
    return Reason(knob=reason.knob, chosen=chosen, why=why, rejected=reason.rejected)
