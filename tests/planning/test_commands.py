"""The commands around plans, on the demo's plan: ask again, compare, seal."""

import json
from pathlib import Path

import pytest

from autotune.plan.plan import FrozenPart
from autotune.plan.plan_file import read_plan, seal, write_plan
from autotune.search.arrival import sealed_path
from tests.conftest import Journey, autotune_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands and a blank")


def test_train_measures_a_predicted_plan_once_and_writes_it_beside(
    capfd: pytest.CaptureFixture[str], journey: Journey, folder: Path
) -> None:
    frozen = journey.plan.frozen.model_dump(mode="json")
    frozen["trials"], frozen["search_seconds"] = [], 0.0
    frozen["expected"].update(evidence="predicted", step_seconds=123.0)
    path = folder / "predicted.yaml"
    write_plan(path, seal(journey.plan.job, FrozenPart.model_validate_json(json.dumps(frozen))))
    run = ("train", path, "--steps", 2, "--json", "--output")
    first = autotune_here(capfd, *run, folder / "one")
    assert first.returncode == 0, first.stderr
    assert "123 predicted" in " ".join(first.stderr.split())
    sealed = read_plan(sealed_path(path))
    assert sealed.frozen.expected.evidence == "measured"
    assert sealed.frozen.expected.step_seconds < 100
    assert json.loads(first.stdout)["plan_digest"] == sealed.digest
    again = autotune_here(capfd, *run, folder / "two")
    assert again.returncode == 0, again.stderr
    assert "predicted" not in again.stderr
    assert json.loads(again.stdout)["plan_digest"] == sealed.digest
