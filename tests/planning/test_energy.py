"""Energy as the objective: measured in trials, it chooses other settings than time does;
elsewhere it is refused."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autotune.errors import InvalidInput, NothingFits
from autotune.machine.energy import EnergyMeter, mean_watts
from autotune.plan.candidate import Candidate
from autotune.plan.trial import TrialResult
from autotune.report.plan import explain_lines, plan_lines
from autotune.search.problem import require_devices
from autotune.search.request import PlanRequest, ResolvedRequest
from autotune.search.winner import ENERGY_HINT, require_winner, score_trials
from tests import builders
from tests.machine.test_energy import Card, system_of
from tests.planning.machines import CAPABILITIES, HARDWARE, answer, make_plan, request, surroundings

pytestmark = pytest.mark.usefixtures("_by_formula")
BATCH = 2


def energy_request(**changes: object) -> PlanRequest:
    return request(
        workload_overrides=replace(request().workload_overrides, objective="energy"), **changes
    )


def watts_of(candidate: Candidate) -> float:
    """The faster attention draws twice the power."""
    return 600.0 if candidate.attention == "_native_cudnn" else 300.0


@dataclass
class MeteredTrials:
    """Trials whose power is read from NVML's counter while the card takes what the settings make
    it take."""

    card: Card
    meter: EnergyMeter
    tells: bool = True

    def __call__(self, candidate: Candidate) -> TrialResult:
        result = answer(candidate)
        before = self.meter.read()
        self.card.watts = watts_of(candidate)
        time.sleep(0.05)
        watts = mean_watts(before, self.meter.read())
        joules = watts and watts * (result.median_step_seconds or 0.0) / BATCH
        return result.changed(joules_per_image=joules if self.tells else None)


def metered(monkeypatch: pytest.MonkeyPatch, *, tells: bool = True) -> MeteredTrials:
    card = Card()
    return MeteredTrials(card, EnergyMeter("cuda", 0, system_of(card, monkeypatch)), tells)


def test_energy_chooses_other_settings_than_time_where_power_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_time = make_plan(request(), HARDWARE, backend=surroundings(metered(monkeypatch)))
    by_energy = make_plan(energy_request(), HARDWARE, backend=surroundings(metered(monkeypatch)))
    assert by_time.frozen.settings.attention == "_native_cudnn"
    assert by_energy.frozen.settings.attention == "native"
    expected = by_energy.frozen.expected
    told = [trial.joules_per_image or 0.0 for trial in by_energy.frozen.trials]
    assert expected.joules_per_image == pytest.approx(min(told), rel=0.03)
    assert expected.joules_per_image == pytest.approx(
        300.0 * expected.step_seconds / BATCH, rel=0.2
    )
    assert expected.step_seconds > by_time.frozen.expected.step_seconds
    assert (by_time.frozen.expected.joules_per_image or 0.0) > 1.5 * expected.joules_per_image
    (reason,) = (reason for reason in by_energy.frozen.reasons if reason.knob == "attention")
    assert reason.why.startswith("part of the most economical settings")
    assert any("x the energy" in other.reason for other in reason.rejected)


def test_plan_and_explanation_tell_the_energy_whatever_the_objective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(request(), HARDWARE, backend=surroundings(metered(monkeypatch)))
    joules, steps = plan.frozen.expected.joules_per_image, plan.job.num_steps
    assert joules
    assert plan.job_kwh == pytest.approx(joules * steps * BATCH / 3.6e6)
    assert [
        line
        for line in plan_lines(plan)
        if line.startswith("energy ") and " kWh for the steps" in line
    ]
    assert sum(line.endswith(" J an image") for line in explain_lines(plan)) == len(
        plan.frozen.trials
    )


def test_a_plan_whose_card_did_not_tell_says_nothing_of_it() -> None:
    plan = make_plan(request(), HARDWARE, backend=surroundings())
    assert plan.job_kwh is None
    assert not [
        line
        for line in (*plan_lines(plan), *explain_lines(plan))
        if "energy" in line or " J an" in line
    ]


def test_the_first_trial_that_cannot_tell_ends_the_search_with_its_reason() -> None:
    tried: list[Candidate] = []

    def run(candidate: Candidate) -> TrialResult:
        tried.append(candidate)
        return answer(candidate).changed(message="several processes compute on the card")

    with pytest.raises(
        NothingFits, match=r"no trial could measure how much energy.*: several processes"
    ) as caught:
        make_plan(energy_request(), HARDWARE, backend=surroundings(run))
    assert len(tried) == 1
    assert "leave --objective energy out" in caught.value.hint


def test_settings_that_ran_untold_are_not_said_to_need_too_much() -> None:
    first, second = (Candidate(micro_batch_size=size, checkpointed_blocks=0) for size in (1, 2))
    results = [builders.trial(first, 1.0, builders.GIB), builders.trial(second, outcome="oom")]
    with pytest.raises(NothingFits, match="no trial could measure how much energy") as caught:
        require_winner(score_trials(results), "energy", lambda: "ask for less")
    assert caught.value.hint == ENERGY_HINT


def test_nothing_is_compiled_for_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = builders.hardware(*CAPABILITIES, "compile", compute_capability=(9, 0))
    monkeypatch.setattr("autotune.knobs.compile.STARTUP_SECONDS", 0.001)
    pins = (("norm_rope", "stock"), ("modulation", "resident"))
    asked = replace(energy_request(pins=pins), job_overrides={"num_steps": 10**6})
    plan = make_plan(asked, compiling, backend=surroundings(metered(monkeypatch)))
    assert all(trial.candidate.compile == "off" for trial in plan.frozen.trials)
    (reason,) = (reason for reason in plan.frozen.reasons if reason.knob == "compile")
    assert "only where time is the objective" in reason.rejected[0].reason


def test_energy_is_refused_where_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="energy is measured, not predicted") as caught:
        make_plan(energy_request(is_local=False), HARDWARE)
    assert "on the machine itself" in caught.value.hint
    small = builders.hardware("attention.native", "precision.bf16", budget_bytes=5 * builders.GIB)
    sharded = replace(energy_request(num_processes=4), pins=(("quantization", "none"),))
    sharded = replace(
        sharded, workload_overrides=replace(sharded.workload_overrides, effective_batch_size=4)
    )
    with pytest.raises(InvalidInput, match="sharded weights are never tried"):
        make_plan(sharded, small, backend=surroundings())


def test_energy_is_refused_on_a_machine_that_does_not_tell() -> None:
    resolved = ResolvedRequest.build(energy_request(), needs_weights=False)
    cpu = HARDWARE.changed(device=HARDWARE.device.changed(kind="cpu"))
    local = replace(resolved, model=replace(resolved.model, folder=Path("model")))
    with pytest.raises(InvalidInput, match="nothing counts what a cpu device takes"):
        require_devices(local, cpu)
