"""One plan over many subjects: a queue that goes on after kills and failures, and an array of
jobs.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar

import pytest

import autotune
from autotune.api.many_runs import find_places
from autotune.errors import DoesNotFit, InvalidInput, InvalidPlan
from autotune.knobs.optimizer import ALLOWED
from autotune.runtime import process_queue
from autotune.runtime.process_queue import QueuedCommand, run_queue
from autotune.schema.hardware import HardwareProfile
from autotune.schema.plan_file import seal, write_plan
from autotune.schema.workload import OptimizerChoice
from autotune.training.metrics import read_metrics
from tests import builders
from tests.conftest import autotune_here
from tests.forked import start_forked
from tests.training.small import machine, make_plan, write_model_and_images
from tests.training.test_fit import planned

SUBJECTS = """\
subjects:
- {name: first, num_steps: 99999, learning_rate: 2e-3}
- {name: lost, data: nowhere}
- {name: last, data: images, validation: 20%}
"""


class Forked:
    """A command in a process that a fork server started, as Popen: its imports are paid for
    already.
    """

    started: ClassVar[list[ForkServerProcess]] = []

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str], stdout: Any, **_: object
    ) -> None:
        assert arguments[1:3] == ("-m", "autotune")
        self.process = start_forked(tuple(arguments[3:]), Path(stdout.name), environment=env)
        self.started.append(self.process)

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)


@pytest.mark.slow
def test_what_was_killed_is_resumed_what_is_done_is_known_and_one_failure_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_queue.subprocess, "Popen", Forked)
    model, images = write_model_and_images(tmp_path)
    plan = make_plan(
        model, images, machine(), num_steps=4, checkpointing_steps=2, output=str(tmp_path / "runs")
    )
    write_plan(tmp_path / "plan.yaml", plan)
    (tmp_path / "subjects.yaml").write_text(SUBJECTS)
    words = ("train", str(tmp_path / "plan.yaml"), "--over", str(tmp_path / "subjects.yaml"))
    first = tmp_path / "runs" / "first"

    def kill() -> None:
        wait_until(lambda: len(read_metrics(first / "metrics.jsonl")) >= 3)
        os.kill(Forked.started[0].pid or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    table = autotune_here(capfd, *words)
    killer.join()
    assert table.returncode == 1, table.stderr
    lines = table.stdout.splitlines()
    assert [line.split()[0] for line in lines if line[:1] not in " "] == [
        "subject",
        "first",
        "lost",
        "last",
        "2",
    ]
    assert "ended by signal 9" in table.stdout
    assert f"there is no data folder {tmp_path}/nowhere" in " ".join(table.stdout.split())
    assert f"  {tmp_path}/runs/last/pytorch_lora_weights.safetensors" in lines
    assert len(Forked.started) == 3
    (tmp_path / "nowhere").symlink_to(images)
    steps = (
        len(read_metrics(first / "metrics.jsonl")) + 2
    )  # it may be made shorter, as its rate does not depend on them
    (tmp_path / "subjects.yaml").write_text(SUBJECTS.replace("99999", str(steps)))
    again = autotune_here(capfd, *words, "--json")
    assert again.returncode == 0, again.stderr
    runs = json.loads(again.stdout)
    assert [(run["name"], run["report"]["num_steps"]) for run in runs] == [
        ("first", steps),
        ("lost", 4),
        ("last", 4),
    ]
    assert runs[0]["report"]["resumed_at"] >= 2
    assert runs[2]["report"]["validation"]["num_images"] == 1
    assert len(Forked.started) == 5  # what was done was not started again


def test_what_no_subject_can_say_is_refused_before_any_run(tmp_path: Path) -> None:
    file = tmp_path / "subjects.yaml"
    for text, message in {
        "subjects: []": "lists no subjects",
        "subjects: [{name: ../up}]": "subjects.0.name",
        "subjects: [{name: a, output: b}]": "subject a has an unknown field 'output'",
        "subjects: [{name: a, vae: other.safetensors}]": "subject a has an unknown field 'vae'",
        "subjects: [{name: a, learnin_rate: 1.0}]": "unknown field 'learnin_rate'",
        "subjects: [{name: a}, {name: A}]": "two subjects 'a'",
        "subjects: [{name: a}, {name: A.log}]": "the log of 'a' would be the folder of 'a.log'",
        "- a": "lists no subjects",
    }.items():
        file.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            autotune.load_subjects(file)
    with pytest.raises(InvalidInput, match="No such file"):
        autotune.load_subjects(tmp_path / "none.yaml")
    file.write_text("subjects: [{name: a}, {name: b, learning_rate: 7}]")
    with pytest.raises(InvalidPlan, match=r"subject b: job\.learning_rate"):
        autotune.train_many(planned(), file)


def test_a_plan_with_an_optimizer_of_the_users_own_is_trained_and_submitted_on_their_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ALLOWED, "")
    plan, name = planned(), "torch.optim:SGD"
    workload = plan.frozen.workload.changed(optimizer=OptimizerChoice(name=name))
    own = seal(plan.job.changed(data="photos"), plan.frozen.changed(workload=workload))
    write_plan(tmp_path / "plan.yaml", own)
    (tmp_path / "s.yaml").write_text("subjects: [{name: a, learning_rate: 7}]")
    file, over = str(tmp_path / "plan.yaml"), ("--over", str(tmp_path / "s.yaml"))
    assert (
        "not for lion" in autotune_here(capfd, "train", file, *over, "--optimizer", "lion").stderr
    )
    submit = ("job-script", file, "--for", "slurm")
    assert "takes your consent" in autotune_here(capfd, *submit).stderr
    assert f"--optimizer {name} " in autotune_here(capfd, *submit, "--optimizer", name).stdout
    monkeypatch.setenv(ALLOWED, "")
    assert "subject a" in autotune_here(capfd, "train", file, *over, "--optimizer", name).stderr
    assert os.environ[ALLOWED] == name  # what the runs' processes inherit


def test_places_in_the_file_count_from_it_and_a_task_of_an_array_finds_its_subject_by_number(
    tmp_path: Path,
) -> None:
    file = tmp_path / "subjects.yaml"
    file.write_text(
        "subjects: [{name: a, data: x}, {name: b, validation: 10%, preview_prompts: [p, q]}]"
    )
    first, second = autotune.load_subjects(file)
    assert first.job == {"data": str(tmp_path / "x")}
    assert second.job == {"validation": "10%", "preview_prompts": ("p", "q")}
    assert autotune.subject_job(planned(), file, "2", "runs")["output"] == "runs/b"
    assert autotune.subject_job(planned(), file, "a")["data"] == str(tmp_path / "x")
    with pytest.raises(InvalidInput, match="no subject '3' among 2"):
        autotune.subject_job(planned(), file, "3")


@pytest.mark.parametrize(
    "options", ["--subject a", "--over s.yaml --trace", "--over s.yaml --nodes 2"]
)
def test_options_that_do_not_go_together_are_wrong_usage(
    capfd: pytest.CaptureFixture[str], options: str
) -> None:
    assert autotune_here(capfd, "train", "plan.yaml", *options.split()).returncode == 2


def cards(monkeypatch: pytest.MonkeyPatch, *budgets_gib: int) -> HardwareProfile:
    """A machine with GPUs that leave so much to a run; the first one's profile."""

    def card(index: int) -> HardwareProfile:
        profile = builders.hardware(budget_bytes=budgets_gib[index] * builders.GIB)
        return profile.changed(device=profile.device.changed(index=index, count=len(budgets_gib)))

    monkeypatch.setattr("autotune.api.many_runs.probe", card)
    return card(0)


def test_each_run_gets_gpus_of_its_own_that_have_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [*find_places(plan, cards(monkeypatch, 60, 0, 60))] == [
        {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "2"}
    ]  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-x,7")
    assert find_places(plan, cards(monkeypatch, 60, 60, 0))[1] == {"CUDA_VISIBLE_DEVICES": "GPU-x"}
    pair = plan.frozen.hardware.changed(num_processes=2, strategy="ddp")
    both = plan.changed(frozen=plan.frozen.changed(hardware=pair))
    assert find_places(both, cards(monkeypatch, 60, 60, 60)) == [
        {"CUDA_VISIBLE_DEVICES": "5,GPU-x"}
    ]
    with pytest.raises(DoesNotFit, match="run memory"):
        find_places(plan, cards(monkeypatch, 0, 0))


def test_the_hosts_memory_bounds_how_many_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, first = planned(), cards(monkeypatch, 60, 60, 60)
    there = first.host.available_memory_bytes
    expected = plan.frozen.expected.changed(host_memory_bytes=int(there / 2.5))
    assert len(find_places(plan.changed(frozen=plan.frozen.changed(expected=expected)), first)) == 2


def script(folder: Path, name: str, text: str) -> QueuedCommand:
    return QueuedCommand(name, ("sh", "-c", text), folder / f"{name}.log")


def test_places_are_used_at_once_and_again_and_a_signal_reaches_those_that_run(
    tmp_path: Path,
) -> None:
    ended: list[tuple[str, int]] = []
    meet = "touch $PLACE; until [ -e one ] && [ -e two ]; do sleep 0.01; done; echo $PLACE"
    commands = [
        script(tmp_path, name, f"cd {tmp_path}; {meet}; exit {name == 'b':d}") for name in "abc"
    ]
    places = [{"PLACE": "one"}, {"PLACE": "two"}]
    assert (
        run_queue(
            commands, places, lambda *_: None, lambda one, status: ended.append((one.name, status))
        )
        is None
    )
    assert sorted(ended) == [("a", 0), ("b", 1), ("c", 0)]
    assert (tmp_path / "a.log").read_text() == "one\n"

    def interrupt(*_: object) -> None:
        (tmp_path / "told").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    waits = "trap 'exit 75' TERM; while :; do sleep 0.02; done"
    ended.clear()
    told = [script(tmp_path, "d", waits), script(tmp_path, "e", waits)]
    stopped = run_queue(
        told, places[:1], interrupt, lambda one, status: ended.append((one.name, status))
    )
    assert stopped == "SIGTERM"
    assert [name for name, _ in ended] == ["d"]


def test_an_array_of_jobs_has_a_task_for_each_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = planned().job.changed(data="photos", output="out", num_steps=100)
    write_plan(Path("plan.yaml"), planned().changed(job=job))
    Path("subjects.yaml").write_text("subjects: [{name: a, num_steps: 90000}, {name: b}]")
    words = ("job-script", "plan.yaml", "--over", "subjects.yaml")
    text = autotune_here(capfd, *words, "--for", "slurm").stdout
    assert "#SBATCH --array=1-2\n" in text
    call = (
        f"autotune train {tmp_path}/plan.yaml --over {tmp_path}/subjects.yaml --output "
        f"{tmp_path}/out --resume"
    )
    assert f'{call} --subject "$SLURM_ARRAY_TASK_ID" || status' in text
    alone = autotune_here(capfd, *words[:2], "--for", "slurm").stdout
    limits = [line for each in (text, alone) for line in each.splitlines() if "--time" in line]
    assert limits[0] > limits[1]  # that of the longest
    refused = autotune_here(capfd, *words, "--for", "docker", "--image", "x")
    assert (refused.returncode, "only SLURM" in refused.stderr) == (2, True)


def wait_until(true: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
