"""The commands around plans, on the demo's plan: ask again, compare, seal."""

import json
import shlex
from pathlib import Path

import pytest

from autotune.plan.plan import FrozenPart
from autotune.plan.plan_file import read_plan, seal, write_plan
from autotune.search.arrival import sealed_path
from tests.conftest import Journey, autotune_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands and a blank")


@pytest.mark.slow
def test_a_study_gives_its_plan_again(
    capfd: pytest.CaptureFixture[str], journey: Journey, folder: Path
) -> None:
    asked = (
        "--from",
        journey.plan_file,
        "--max-trials",
        2,
        "--pin",
        "quantization=none",
        "--no-profiles",
    )
    first = autotune_here(capfd, "plan", *asked, "--study", "s", "-o", folder / "a.yaml")
    assert first.returncode == 0, first.stderr
    plan = read_plan(folder / "a.yaml")
    assert plan.job == journey.plan.job
    assert plan.frozen.workload == journey.plan.frozen.workload
    assert plan.frozen.pins == (("quantization", "none"),)
    assert all(trial.outcome == "ok" for trial in plan.frozen.trials)
    assert len({trial.candidate for trial in plan.frozen.trials}) >= 2
    assert (
        0
        < plan.frozen.search_seconds
        == pytest.approx(sum(t.wall_seconds or 0 for t in plan.frozen.trials))
    )
    words, _, command = first.stdout.partition("train it with:")
    assert max(len(line) for line in words.splitlines() if not line.startswith("written to ")) <= 80
    assert shlex.split(command) == ["autotune", "train", str(folder / "a.yaml")]

    resumed = autotune_here(capfd, "plan", *asked, "--study", "s", "-o", folder / "b.yaml")
    assert resumed.returncode == 0, resumed.stderr
    assert (folder / "b.yaml").read_bytes() == (folder / "a.yaml").read_bytes()


def test_two_plans_are_compared(
    capfd: pytest.CaptureFixture[str], journey: Journey, folder: Path
) -> None:
    frozen = journey.plan.frozen.model_dump(mode="json")
    frozen["settings"]["micro_batch_size"] = 2
    frozen["expected"]["step_seconds"] *= 2
    other = folder / "slower.yaml"
    write_plan(other, seal(journey.plan.job, FrozenPart.model_validate_json(json.dumps(frozen))))
    found = json.loads(
        autotune_here(capfd, "diff", journey.plan_file, other, "--json", "--price", 3.6).stdout
    )
    by_name = {item["name"]: item for item in found}
    assert set(by_name) == {"settings.micro_batch_size", "step_seconds", "run_seconds", "cost"}
    assert by_name["step_seconds"]["ratio"] == pytest.approx(2)
    assert by_name["cost"]["first"] == pytest.approx(journey.plan.job_seconds / 1000)
    assert by_name["settings.micro_batch_size"]["second"] == 2
    text = autotune_here(capfd, "diff", journey.plan_file, other).stdout
    assert "micro batch size" in text
    assert "2.00x" in text
    same = autotune_here(capfd, "diff", journey.plan_file, journey.plan_file)
    assert same.stdout == "the plans do not differ\n"


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
