"""The commands around plans, on the demo's plan: ask again, compare, seal."""

import json
import shlex
from pathlib import Path

import pytest

from autotune.planning.sealing import sealed_path
from autotune.reporting.plan import differences, plan_lines, train_hint
from autotune.schema.plan import FrozenPart
from autotune.schema.plan_file import read_plan, seal, write_plan
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
    first = autotune_here(
        capfd,
        "plan",
        *asked,
        "--study",
        "s",
        "-o",
        folder / "a.yaml",
    )
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


def test_plans_are_compared_by_what_a_run_and_a_step_take(journey: Journey) -> None:
    frozen = journey.plan.frozen.model_dump(mode="json")
    frozen["expected"]["peak_memory_bytes"] += 1 << 40
    found = differences(
        journey.plan, seal(journey.plan.job, FrozenPart.model_validate_json(json.dumps(frozen)))
    )
    expected = journey.plan.frozen.expected
    firsts = {item.name: item.first for item in found}
    assert firsts == {
        "run_memory_bytes": expected.run_memory_bytes,
        "step_memory_bytes": expected.peak_memory_bytes,
    }


def test_a_rank_is_chosen_not_measured_so_two_have_no_ratio(journey: Journey) -> None:
    frozen = journey.plan.frozen.model_dump(mode="json")
    plans = []
    for rank in (96, 128):
        frozen["workload"]["rank"] = rank
        plans.append(seal(journey.plan.job, FrozenPart.model_validate_json(json.dumps(frozen))))
    (found,) = differences(*plans)
    assert (found.name, found.first, found.second, found.ratio) == ("workload.rank", 96, 128, None)


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), "--from"),
        (("plan", "--from", "nowhere.yaml"), "there is no plan at"),
    ],
)
def test_wrong_usage_is_named(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    process = autotune_here(capfd, *arguments)
    assert process.returncode == 2
    assert words in " ".join(process.stderr.split())


def test_a_plan_without_data_names_what_its_train_command_needs(journey: Journey) -> None:
    plan, file = journey.plan, Path("my plan.yaml")
    assert (
        train_hint(plan, file)
        == "written to my plan.yaml; train it with: autotune train 'my plan.yaml'"
    )
    without = plan.changed(job=plan.job.changed(data=None))
    assert train_hint(without, file).endswith("autotune train 'my plan.yaml' --data FOLDER")


def test_a_plan_claims_no_saving_that_nothing_was_measured_against(journey: Journey) -> None:
    frozen = journey.plan.frozen
    winners = tuple(trial for trial in frozen.trials if trial.candidate == frozen.settings)
    for trials in (frozen.trials, winners[:1]):
        lines = plan_lines(journey.plan.changed(frozen=frozen.changed(trials=trials)))
        assert not [line for line in lines if "saves" in line]
