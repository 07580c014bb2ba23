"""Two teams, real trials, through the commands: what one machine measured is where another one
starts.

How many trials that saves is proven by formula (`test_plans_with_records`): real ones take another
time each run.
"""

from pathlib import Path

import pytest

from autotune.demo.lesson import PLAN_OPTIONS
from autotune.machine.store import cached_profile
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan_file import read_plan
from tests.conftest import Journey, autotune_here

PACE = 0.8


def slower(here: HardwareProfile) -> HardwareProfile:
    """Another machine than the one that really runs: its measured rates are lower."""
    rates = tuple(
        rate.model_copy(
            update={"value": rate.value / PACE if rate.unit == "s" else rate.value * PACE}
        )
        for rate in here.rates
    )
    device = here.device.model_copy(update={"name": "another CPU"})
    return HardwareProfile.model_validate({**dict(here), "device": device, "rates": rates})


@pytest.mark.slow
def test_a_team_with_anothers_records_starts_where_the_other_ended(
    journey: Journey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def command(*arguments: object) -> str:
        done = autotune_here(capfd, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    alone, team = journey.plan.frozen, tmp_path / "team"
    monkeypatch.setenv("XDG_DATA_HOME", str(journey.data_home))
    command("profiles", "push", team, "--create")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "bob"))
    assert "new: " in command("profiles", "pull", team)
    bob = slower(cached_profile())
    monkeypatch.setattr("autotune.api.machines.cached_profile", lambda **_: bob)
    asked = ("--model", journey.model, "--data", journey.images, "--resolution", 64, *PLAN_OPTIONS)
    command("plan", *asked, "--search-time", 600, "-o", tmp_path / "plan.yaml")
    helped = read_plan(tmp_path / "plan.yaml").frozen
    assert helped.records
    assert helped.hardware.device_name == "another CPU"
    assert helped.expected.evidence == "measured"
    ran = [trial for trial in helped.trials if not trial.confirms]
    assert ran[0].candidate == alone.settings
