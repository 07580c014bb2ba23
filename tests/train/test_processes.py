"""Several processes learn what one learns: started here, or by torchrun on nodes of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from autotune.errors import AutotuneError, DoesNotFit, InvalidInput
from autotune.plan.file import save_plan, seal
from autotune.plan.plan import RunReport, TrainingPlan
from autotune.train import fit
from autotune.train.folder import ADAPTER_FILE
from autotune.train.metrics import read_metrics
from autotune.train.prepare import _require_machine, prepare
from autotune.train.processes import init_distributed
from tests import builders
from tests.conftest import autotune_here
from tests.forked import start_forked
from tests.system.test_launching import launched
from tests.train.conftest import CPU, Bench, save, values_of
from tests.train.test_prepare import planned


@dataclass(frozen=True)
class Nodes:
    """Two processes as torchrun would start them on two nodes, without paying for imports."""

    folder: Path
    plan: TrainingPlan

    def start(self, *flags: str, step_wait_seconds: float | None = None) -> list[ForkServerProcess]:
        save_plan(self.plan, self.folder / "plan.yaml")
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.getsockname()[1]}
        words = ("--progress", "none", "train", self.folder / "plan.yaml", *flags, "--output")
        started = []
        for rank in (0, 1):
            home = {"XDG_CACHE_HOME": self.folder / f"home-{rank}"}
            how: Any = {"environment": launched(RANK=rank, WORLD_SIZE=2, **meet, **home)}
            log, how["step_wait_seconds"] = self.folder / f"log-{rank}", step_wait_seconds
            started.append(start_forked((*words, self.output(rank)), log, **how))
        return started

    def output(self, rank: int) -> Path:
        return self.folder / f"output-{rank}"

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"log-{rank}").read_text()

    def wait_for_step(self, step: int, started: list[ForkServerProcess]) -> None:
        deadline = time.monotonic() + 300
        while len(read_metrics(self.output(0) / "metrics.jsonl")) < step:
            assert all(process.is_alive() for process in started), self.log()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def finish(self, started: list[ForkServerProcess], seconds: float = 240) -> list[int | None]:
        """Exit statuses, once all have ended."""
        deadline = time.monotonic() + seconds
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        statuses = [process.exitcode for process in started]
        for process in started:
            process.kill()
        return statuses


def assert_one_learns_the_same(bench: Bench, plan: TrainingPlan, several: Path) -> None:
    """Compare losses and weights with those of one process."""
    losses: list[float] = []
    folder = several.parent.parent
    one = bench.loop(plan, folder / "one", on_step=lambda event: losses.append(event.loss))
    rows = read_metrics(several.parent / "metrics.jsonl")
    assert [row.loss for row in rows] == pytest.approx(losses, abs=1e-5)
    left, right = load_file(several), load_file(save(one, folder / "one.safetensors"))
    torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_local_processes_learn_as_one(bench, tmp_path):
    output = tmp_path / "two"
    plan = bench.plan(num_processes=2, num_steps=24, output=str(output), checkpointing_steps=10)
    save_plan(plan, tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "autotune", "train", str(tmp_path / "plan.yaml")]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    stopped = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    deadline = time.monotonic() + 300
    while len(read_metrics(output / "metrics.jsonl")) < 3:
        assert stopped.poll() is None, stopped.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=240)
    assert stopped.returncode == 75, errors
    assert errors.count("hint: go on from there") == 1, errors
    assert "Traceback" not in errors
    command.append("--resume")
    two = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("loss on fresh noise") == 1  # the first process alone reports
    assert_one_learns_the_same(bench, plan, output / ADAPTER_FILE)


@pytest.mark.slow
def test_two_nodes_learn_what_one_learns(bench, tmp_path):
    plan = bench.plan(num_processes=2, num_steps=12, checkpointing_steps=2)
    two = Nodes(tmp_path, plan)
    started = two.start()
    two.wait_for_step(5, started)
    os.kill(started[1].pid or 0, signal.SIGKILL)
    assert two.finish(started, 60)[0] == 1
    assert "error: another process of this run has ended" in two.log()
    assert two.finish(two.start("--resume")) == [0, 0], two.log()
    assert not (two.output(1) / ADAPTER_FILE).exists()
    text = two.log(0) + two.log(1)
    assert text.count("loss on fresh noise") == 1
    assert "find_unused_parameters" not in text
    assert_one_learns_the_same(bench, plan, two.output(0) / ADAPTER_FILE)


def test_sharded_weights_learn_as_one(bench, tmp_path):
    plan = bench.plan(num_processes=2, strategy="fsdp2", num_steps=3)
    two = Nodes(tmp_path, plan)
    assert two.finish(two.start()) == [0, 0], two.log()
    assert_one_learns_the_same(bench, plan, two.output(0) / ADAPTER_FILE)


@pytest.mark.slow
def test_stopped_shards_resume_as_one(bench, tmp_path):
    plan = bench.plan(num_processes=2, strategy="fsdp2", num_steps=12, checkpointing_steps=10)
    two = Nodes(tmp_path, plan)
    stopped = two.start()
    two.wait_for_step(3, stopped)
    for process in stopped:
        process.terminate()
    assert two.finish(stopped) == [75, 75], two.log()
    assert two.finish(two.start("--resume")) == [0, 0], two.log()
    assert_one_learns_the_same(bench, plan, two.output(0) / ADAPTER_FILE)


@pytest.mark.slow
def test_shards_are_validated(bench, tmp_path):
    before = bench.loop(bench.plan(num_steps=2), tmp_path / "before")
    earlier, held_out = save(before, tmp_path / "earlier.safetensors"), tmp_path / "held-out"
    begun = replace(bench, initial=values_of(bench.trained.adapter))
    held_out.mkdir()
    Image.new("RGB", (40, 40), "teal").save(held_out / "a.png")
    (held_out / "a.txt").write_text("a red circle")
    own = {"validation": str(held_out), "validation_every": 2, "from_adapter": str(earlier)}
    plan = bench.plan(num_processes=2, strategy="fsdp2", num_steps=4, **own)
    two = Nodes(tmp_path, plan)
    assert two.finish(two.start()) == [0, 0], two.log(0) + two.log(1)
    rows = read_metrics(two.output(0) / "metrics.jsonl")
    assert [row.step for row in rows if row.validation_loss is not None] == [2, 4]
    assert two.log().count("loss on 1 held-out image") == 1
    report = RunReport.model_validate_json((two.output(0) / "report.json").read_bytes())
    assert report.validation is not None
    unmeasured = plan.changed(job=plan.job.changed(validation=None))
    assert_one_learns_the_same(begun, unmeasured, two.output(0) / ADAPTER_FILE)


@pytest.mark.slow
def test_a_process_that_hangs_is_noticed(bench, tmp_path):
    two = Nodes(tmp_path, bench.plan(num_processes=2, num_steps=12))
    started = two.start(step_wait_seconds=3)
    two.wait_for_step(3, started)
    os.kill(started[1].pid or 0, signal.SIGSTOP)
    assert two.finish(started[:1], 60) == [1]
    assert "error: another process of this run does not answer" in two.log()
    started[1].kill()


def test_other_process_counts_are_refused(bench, tmp_path):
    with pytest.raises(AutotuneError, match="the plan is for 2 processes, but 1 run"):
        init_distributed(bench.plan(num_processes=2).frozen.hardware, CPU)
    output = str(tmp_path)
    with pytest.raises(InvalidInput, match="an effective batch of 4 cannot be shared evenly by 3"):
        prepare(bench.plan(num_processes=3, output=output), bench.hardware, resume=False)
    with pytest.raises(DoesNotFit, match="each gets 1 image"):
        prepare(bench.plan(num_processes=4, output=output), bench.hardware, resume=False)


def test_launcher_looks_for_room_first(monkeypatch, capfd, tmp_path):
    plan = planned()
    needed = plan.frozen.expected.run_memory_bytes
    free, full = (builders.hardware(budget_bytes=size) for size in (needed, needed - 1))
    used = full.changed(device=full.device.changed(index=1))
    pair = plan.frozen.hardware.changed(num_processes=2, strategy="ddp")
    plan = seal(plan.job, plan.frozen.changed(hardware=pair))
    monkeypatch.setattr(fit, "device_misfits", lambda number, hardware: ())
    monkeypatch.setattr(fit, "probe", lambda index: (free, used)[index])
    monkeypatch.setattr("autotune.api.read_machine", lambda: free)
    save_plan(plan, tmp_path / "plan.yaml")
    checked = autotune_here(capfd, "check", tmp_path / "plan.yaml")
    assert (checked.returncode, "on cuda:1" in " ".join(checked.stdout.split())) == (4, True)
    with pytest.raises(DoesNotFit, match="on cuda:1"):
        _require_machine(plan, free)
    with pytest.raises(DoesNotFit, match="here"):
        _require_machine(plan, full)
    for name, value in launched("autotune-1").items():
        monkeypatch.setenv(name, value)
    _require_machine(plan, full)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun's own")
    with pytest.raises(DoesNotFit, match="here"):
        _require_machine(plan, full)
