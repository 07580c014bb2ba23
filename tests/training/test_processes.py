"""Two processes learn what one learns."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autotune.errors import AutotuneError, DoesNotFit, InvalidInput
from autotune.runtime import THIS_NODE
from autotune.runtime.launching import launch
from autotune.schema.events import ignore_event
from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import seal, write_plan
from autotune.training.adapter_file import save_trained
from autotune.training.files import ADAPTER_FILE, checkpoints_of
from autotune.training.metrics import read_metrics
from autotune.training.preparation import _require_machine, prepare
from autotune.training.processes import join_processes
from autotune.training.run import _Run
from autotune.training.sharding import num_shards_of
from tests import builders
from tests.conftest import autotune_here
from tests.forked import start_forked
from tests.planning.machines import wait_until
from tests.runtime.test_launchers import launched
from tests.training.conftest import CPU, Bench
from tests.training.small import SETTINGS
from tests.training.test_fit import planned
from tests.training.test_nodes import free_port


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "number", "nodes"), [("ddp", 2, 1), ("hybrid", 4, 2)])
def test_several_processes_stopped_and_resumed_end_with_the_weights_of_one(
    bench: Bench, tmp_path: Path, strategy: str, number: int, nodes: int
) -> None:
    output = tmp_path / "two"
    plan = bench.plan(
        settings=SETTINGS.changed(micro_batch_size=4 // number),
        num_processes=number,
        num_nodes=nodes,
        strategy=strategy,
        num_steps=24,
        output=str(output),
        checkpointing_steps=10,
    )
    write_plan(tmp_path / "plan.yaml", plan)
    command = [sys.executable, "-m", "autotune", "train", str(tmp_path / "plan.yaml")]
    stopped = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while len(read_metrics(output / "metrics.jsonl")) < 3:
        assert stopped.poll() is None, stopped.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=240)
    assert stopped.returncode == 75, errors
    assert errors.count("hint: go on from there") == 1, errors
    assert "Traceback" not in errors
    two = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, check=False, timeout=600
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("loss on fresh noise") == 1  # the first process alone reports
    assert_one_learns_the_same(bench, plan, output / ADAPTER_FILE)


def assert_one_learns_the_same(bench: Bench, plan: TrainingPlan, several: Path) -> None:
    folder = several.parent.parent
    one, steps = bench.loop(plan, folder / "one"), plan.job.num_steps
    save_trained(
        folder / "one.safetensors",
        one.model,
        one.optimizer,
        plan.frozen.workload,
        plan.digest,
        steps,
    )
    left, right = load_file(several), load_file(folder / "one.safetensors")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-5)


def test_sharded_weights_stopped_and_resumed_are_those_of_one(bench: Bench, tmp_path: Path) -> None:
    """The processes that the launcher would start, without paying for their imports."""
    output = tmp_path / "two"
    plan = bench.plan(
        num_processes=2, strategy="fsdp2", num_steps=12, output=str(output), checkpointing_steps=10
    )
    write_plan(tmp_path / "plan.yaml", plan)
    log = tmp_path / "log"

    def start(*flags: str) -> list[ForkServerProcess]:
        node: dict[str, object] = {
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": free_port(),
        }
        ranks = [
            launched("autotune-1", RANK=r, LOCAL_RANK=r, MASTER_ADDR="127.0.0.1", **node)
            for r in range(2)
        ]
        return [
            start_forked(("train", tmp_path / "plan.yaml", *flags), log, environment=rank)
            for rank in ranks
        ]

    def ended(processes: list[ForkServerProcess]) -> list[int | None]:
        for process in processes:
            process.join(240)
        return [process.exitcode for process in processes]

    stopped = start()
    wait_until(
        lambda: len(read_metrics(output / "metrics.jsonl")) >= 3 or not stopped[0].is_alive(), 240
    )
    for process in stopped:
        process.terminate()
    assert ended(stopped) == [75, 75], log.read_text()
    assert ended(start("--resume")) == [0, 0], log.read_text()
    assert log.read_text().count("loss on fresh noise") == 1
    assert_one_learns_the_same(bench, plan, output / ADAPTER_FILE)


@pytest.mark.parametrize(
    ("code", "expected"), [(4, 4), (-signal.SIGKILL, 137), (-signal.SIGTERM, 143)]
)
def test_a_process_that_ended_badly_gives_the_status_that_one_alone_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="")

    def failing(*arguments: str) -> None:
        raise ChildFailedError("train", {0: failure})

    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda config, executable: failing
    )
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert launch(2, ["train"], lambda: checkpoints_of(tmp_path)) == expected


@pytest.mark.parametrize(("in_time", "expected"), [(True, 75), (False, 143)])
def test_a_signal_is_a_preemption_only_where_a_checkpoint_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool, expected: int
) -> None:
    """torch kills processes that take too long to write one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "checkpoint-000003.safetensors").touch()

    def stopped(*arguments: str) -> None:
        if in_time:
            (folder / "checkpoint-000005.safetensors").touch()
        raise SignalException("stopped", signal.SIGTERM)

    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda config, executable: stopped
    )
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert launch(2, ["train"], lambda: checkpoints_of(tmp_path)) == expected


def test_other_processes_wait_before_they_look_for_what_the_first_encodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(
        "autotune.training.run.encode_dataset",
        lambda *_, **named: done.append("data") or SimpleNamespace(problems=()),
    )
    run = SimpleNamespace(
        previews=["preview"],
        cache=None,
        sampler=SimpleNamespace(encode_prompts=lambda *_: done.append("prompts")),
        processes=SimpleNamespace(is_first_of_node=False, wait=lambda: done.append("wait")),
        on_event=ignore_event,
        _start_phase=lambda name: None,
        plan=SimpleNamespace(job=SimpleNamespace(caption_dropout=0.0, flip=False, mask_floor=0.0)),
        prepared=SimpleNamespace(
            data=SimpleNamespace(
                training=SimpleNamespace(problem_summary=()), whole=None, held_out=()
            ),
            workload=SimpleNamespace(buckets=()),
        ),
        encoders=SimpleNamespace(release=lambda: done.append("release")),
    )
    _Run._encode(run)  # type: ignore[arg-type]
    assert done == ["wait", "prompts", "data", "release"]


def test_another_number_of_processes_than_planned_is_refused(bench: Bench) -> None:
    with pytest.raises(AutotuneError, match="the plan is for 2 processes, but 1 run"):
        join_processes(bench.plan(num_processes=2).frozen.hardware, CPU)


@pytest.mark.parametrize(("number", "strategy"), [(1, "ddp"), (2, "single")])
def test_a_plan_whose_strategy_does_not_suit_its_processes_is_invalid(
    bench: Bench, number: int, strategy: str
) -> None:
    with pytest.raises(ValidationError, match="cannot train by the strategy"):
        bench.plan(num_processes=number, strategy=strategy)


def test_a_plan_for_more_processes_than_images_in_a_step_is_refused(
    bench: Bench, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="an effective batch of 4 cannot be shared evenly by 3"):
        prepare(bench.plan(num_processes=3, output=str(tmp_path)), bench.hardware, resume=False)
    with pytest.raises(DoesNotFit, match="each gets 1 image"):
        prepare(bench.plan(num_processes=4, output=str(tmp_path)), bench.hardware, resume=False)


def test_each_device_must_have_room_and_the_launcher_looks_before_any_process_takes_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = planned()
    needed = plan.frozen.expected.run_memory_bytes
    free, full = (builders.hardware(budget_bytes=size) for size in (needed, needed - 1))
    used = full.model_copy(update={"device": full.device.model_copy(update={"index": 1})})
    pair = plan.frozen.hardware.model_copy(update={"num_processes": 2, "strategy": "ddp"})
    plan = seal(plan.job, plan.frozen.model_copy(update={"hardware": pair}))
    monkeypatch.setattr("autotune.training.processes.device_misfits", lambda number, hardware: ())
    monkeypatch.setattr("autotune.training.processes.probe", lambda index: (free, used)[index])
    monkeypatch.setattr("autotune.api.checking.probe", lambda: free)
    write_plan(tmp_path / "plan.yaml", plan)
    checked = autotune_here(capfd, "check", tmp_path / "plan.yaml")
    assert (checked.returncode, "on cuda:1" in " ".join(checked.stdout.split())) == (4, True)
    with pytest.raises(DoesNotFit, match="on cuda:1"):
        _require_machine(plan, free, THIS_NODE)
    with pytest.raises(DoesNotFit, match="here"):
        _require_machine(plan, full, THIS_NODE)
    for name, value in launched("autotune-1").items():
        monkeypatch.setenv(name, value)
    _require_machine(plan, full, THIS_NODE)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun's own")
    with pytest.raises(DoesNotFit, match="here"):
        _require_machine(plan, full, THIS_NODE)


def test_weights_that_are_not_what_the_plan_says_are_noticed(bench: Bench) -> None:
    assert num_shards_of(bench.trained.transformer) == 1
