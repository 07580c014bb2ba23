"""Whether the fastest settings are compiled: decided by what a short trial of them measured, for
the planned steps.

The search itself compares steady steps, and compiled code has a start-up that only a job of some
length pays back. So when the search is over, and the cost model predicts that the planned steps
save more than the start-up takes, the fastest settings are tried compiled. They stay if what was
measured says so, too. If a start-up with an empty cache is not paid back, another process tries
again: it finds the code that the first one left, as the run will.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.cost.predict import CostModel
from autotune.knobs.compile import startup_seconds
from autotune.knobs.registry import KNOBS
from autotune.plan.candidate import Candidate
from autotune.plan.plan import Reason, Rejected
from autotune.plan.trial import TrialResult
from autotune.plan.workload import GOALS
from autotune.search.problem import PlanningProblem

BLOCK, OFF = "block", "off"
NOT_FOR_TIME = "tried only where time is the objective: compiling takes time, and saves time"
Trials = tuple[TrialResult, ...]


@dataclass(frozen=True)
class Payback:
    """What compiling saves and takes, measured or predicted."""

    saved_seconds: float
    """Of a step; negative if compiled steps are slower."""
    startup_seconds: float
    num_steps: int

    @property
    def pays(self) -> bool:
        """Whether the steps save more than the start-up takes."""
        return self.num_steps * self.saved_seconds > self.startup_seconds

    def __str__(self) -> str:
        if self.saved_seconds <= 0:
            return f"steps become {-self.saved_seconds:.3g} s slower"
        total = self.num_steps * self.saved_seconds
        in_all = f"{total:.3g} s" if total < 600 else f"{total / 60:.0f} min"
        saved = f"{self.saved_seconds:.3g} s a step, {in_all} in {self.num_steps} steps"
        return f"saves {saved}, and takes {self.startup_seconds:.3g} s to start"


def measured_payback(
    trials: Sequence[TrialResult], compiled: TrialResult, num_steps: int
) -> Payback | None:
    """Against the fastest trial that is not compiled; None if either has no steady step.

    The start-up is what the first steps took beyond steady ones.
    """
    steady = [trial.median_step_seconds or 0.0 for trial in trials if _is_plain(trial)]
    own = compiled.median_step_seconds
    if own is None or not steady:
        return None
    startup = max(0.0, sum(compiled.warmup_seconds) - len(compiled.warmup_seconds) * own)
    return Payback(min(steady) - own, startup, num_steps)


def predicted_payback(
    cost: CostModel, plain: Candidate, compiled: Candidate, num_steps: int
) -> Payback:
    """The same by the cost model."""
    saved = cost.predict(plain).step_seconds - cost.predict(compiled).step_seconds
    return Payback(saved, startup_seconds(compiled, cost.family, cost.workload), num_steps)


def choose_compiled(trials: Trials, problem: PlanningProblem) -> Candidate | None:
    """Of the settings that ran, compiled, those predicted to be fastest; None if they are not
    predicted to pay, or the objective is not time: what a start-up takes of anything else is not
    known."""
    if problem.workload.objective != "throughput":
        return None
    running = sorted(
        (t for t in trials if _is_plain(t)), key=lambda trial: trial.median_step_seconds or 0.0
    )
    cost = problem.cost.with_calibration(trials)
    compiled = [
        c
        for trial in running
        if (c := compiled_from(trial.candidate, problem)) and _fits(c, cost, problem)
    ]
    if not compiled:
        return None
    best = min(compiled, key=lambda candidate: cost.predict(candidate).step_seconds)
    payback = predicted_payback(cost, running[0].candidate, best, problem.job.num_steps)
    return best if payback.pays else None


def compiled_from(plain: Candidate, problem: PlanningProblem) -> Candidate | None:
    """The settings compiled, without what does not go with that; None if they cannot be, or may
    not."""
    whole = plain.checkpointed_blocks + plain.selective_blocks
    other = {
        "norm_rope": "stock",
        "modulation": "resident",
        "checkpointed_blocks": whole,
        "selective_blocks": 0,
    }
    compiled = plain.changed(compile=BLOCK, **other)
    is_barred = any(knob.conflict(compiled, problem.cost.context) for knob in KNOBS)
    return compiled if problem.space.admits(compiled) and not is_barred else None


def _fits(candidate: Candidate, cost: CostModel, problem: PlanningProblem) -> bool:
    return cost.predict(candidate).run_memory_bytes <= problem.budget_bytes


def try_compiled(
    trials: Trials, problem: PlanningProblem, run: Callable[[str, Candidate], TrialResult | None]
) -> Trials:
    """`trials` and those of the fastest settings compiled, as unpaid if the planned steps do not
    pay their start-up.

    Args:
        trials: of a search that is over.
        problem: what was searched.
        run: tries a candidate in a process of its own; the first argument says what for.
    """
    candidate = choose_compiled(trials, problem)
    if candidate is None:
        return trials
    for what in ("compiled", "compiled again"):
        found = run(what, candidate)
        if found is None:
            break
        payback = (
            measured_payback(trials, found, problem.job.num_steps)
            if found.outcome == "ok"
            else None
        )
        if payback is None or payback.pays:
            return (*trials, found)
        trials = (*trials, found.changed(outcome="unpaid", message=f"measured: {payback}"))
        if payback.saved_seconds <= 0:
            break
    return trials


def explain_compile(
    reasons: Sequence[Reason], trials: Trials, problem: PlanningProblem, chosen: Candidate
) -> tuple[Reason, ...]:
    """The reasons, that of compiling with its figures: measured if it was tried, else predicted."""
    if BLOCK not in problem.space.on_request.get("compile", ()) or not trials:
        return tuple(reasons)
    steps, tried = problem.job.num_steps, [t for t in trials if t.candidate.compile == BLOCK]
    if chosen.compile == BLOCK:
        payback = measured_payback(trials, [t for t in tried if t.outcome == "ok"][-1], steps)
        return _replaced(reasons, f"measured: {payback}", ())
    if tried:
        return _replaced(
            reasons, "compiled settings were tried", (tried[-1].message or tried[-1].outcome,)
        )
    if problem.workload.objective != "throughput":
        return _replaced(
            reasons,
            f"part of the {GOALS[problem.workload.objective]} settings that run",
            (NOT_FOR_TIME,),
        )
    compiled = compiled_from(chosen, problem)
    if compiled is None:
        return _replaced(
            reasons,
            "part of the fastest settings that run",
            ("does not go with the other settings",),
        )
    payback = predicted_payback(problem.cost.with_calibration(trials), chosen, compiled, steps)
    return _replaced(
        reasons, "settings are compiled if a trial shows that it pays", (f"predicted: {payback}",)
    )


def _replaced(reasons: Sequence[Reason], why: str, against: Sequence[str]) -> tuple[Reason, ...]:
    rejected = tuple(Rejected(choice=BLOCK, reason=reason) for reason in against)
    return tuple(
        reason.changed(why=why, rejected=rejected) if reason.knob == "compile" else reason
        for reason in reasons
    )


def _is_plain(trial: TrialResult) -> bool:
    return trial.outcome == "ok" and trial.candidate.compile == OFF
