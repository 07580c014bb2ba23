"""A trial tells the energy of its steady steps, and takes enough of them if that is what
decides."""

from pathlib import Path

import pytest

from autotune.machine.energy import EnergyMeter
from autotune.plan.trial import TrialResult
from autotune.search import requests, steps
from autotune.search.requests import ChildState, RehearsalRequest, TrialRequest
from tests.machine.test_energy import Card, system_of
from tests.trials.conftest import FIRST, workload


def run(model: Path, objective: str) -> TrialResult:
    work = workload(model).changed(objective=objective)
    return steps.run_trial(TrialRequest(str(model), work, FIRST, "cpu", 3), ChildState())


def test_a_trial_tells_what_an_image_took_unless_its_steps_are_too_short_for_the_counter(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MIN_METERED_SECONDS", 0.5)
    monkeypatch.setattr(steps, "MIN_METERED_SECONDS", 0.5)
    system = system_of(Card(250.0), monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "EnergyMeter", lambda kind, index: EnergyMeter("cuda", index, system))
        told = run(small_model, "energy")
        patch.setattr(steps, "MIN_METERED_SECONDS", 1e3)
        assert told.joules_per_image == pytest.approx(
            250.0 * (told.median_step_seconds or 0.0) / 4, rel=0.2
        )
    assert sum(told.step_seconds) >= 0.5
    untold = run(small_model, "throughput")
    assert (untold.outcome, untold.joules_per_image, untold.message) == ("ok", None, "")


def test_steps_go_on_until_a_counter_has_moved_often_enough(small_model: Path) -> None:
    work = workload(small_model).changed(objective="energy")
    rest = {"caching": None, "max_seconds": 0.0}
    for kind, more in ((TrialRequest, {"prune_above_seconds": 0.1}), (RehearsalRequest, rest)):
        request = kind(str(small_model), work, FIRST, "cpu", 3, **more)  # type: ignore[arg-type]
        assert request.needs_another_step([0.5, 0.5, 0.5])
        assert not request.needs_another_step([0.7, 0.7, 0.7])
