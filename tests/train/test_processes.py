"""Several processes learn what one learns: started here, or by torchrun on nodes of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autotune.errors import AutotuneError, DoesNotFit, InvalidInput
from autotune.plan.file import save_plan, seal
from autotune.plan.plan import RunReport, TrainingPlan
from autotune.system.process import Launch, adopt_launch, launch
from autotune.train import fit
from autotune.train.folder import ADAPTER_FILE
from autotune.train.metrics import read_metrics
from autotune.train.prepare import _require_machine, prepare
from autotune.train.processes import init_distributed
from tests import builders
from tests.conftest import autotune_here
from tests.forked import start_forked
from tests.train.conftest import CPU, save, values_of
from tests.train.test_prepare import planned


@dataclass(frozen=True)
class Nodes:
    """Two processes as torchrun would start them on two nodes, without paying for imports."""

    folder: Path
    plan: TrainingPlan

    def start(self, *flags, step_wait_seconds=None):
        save_plan(self.plan, self.folder / "plan.yaml")
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.getsockname()[1]}
        words = ("--progress", "none", "train", self.folder / "plan.yaml", *flags, "--output")
        started = []
        for rank in (0, 1):
            home = {"XDG_CACHE_HOME": self.folder / f"home-{rank}"}
            how = {"environment": launched(RANK=rank, WORLD_SIZE=2, **meet, **home)}
            log, how["step_wait_seconds"] = self.folder / f"log-{rank}", step_wait_seconds
            started.append(start_forked((*words, self.output(rank)), log, **how))
        return started

    def output(self, rank):
        return self.folder / f"output-{rank}"

    def log(self, rank=0):
        return (self.folder / f"log-{rank}").read_text()

    def wait_for_step(self, step, started):
        deadline = time.monotonic() + 300
        while len([*read_metrics(self.output(0) / "metrics.jsonl")]) < step:
            assert all(process.is_alive() for process in started), self.log()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def finish(self, started, seconds=240):
        deadline = time.monotonic() + seconds
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        statuses = [process.exitcode for process in started]
        for process in started:
            process.kill()
        return statuses


def assert_one_learns_the_same(bench, plan, several):
    losses = []
    folder = several.parent.parent
    one = bench.loop(plan, folder / "one", on_step=lambda event: losses.append(event.loss))
    one.optimizer.turn_to_average()  # as a run ends
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
    stopped = subprocess.Popen(command, **pipes)
    deadline = time.monotonic() + 300
    while len([*read_metrics(output / "metrics.jsonl")]) < 3:
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
    assert two.stdout.count("on fresh noise") == 1  # the first process alone reports
    assert_one_learns_the_same(bench, plan, output / ADAPTER_FILE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_nodes_learn_what_one_learns(bench, tmp_path, strategy):
    plan = bench.plan(num_processes=2, strategy=strategy, num_steps=12, checkpointing_steps=2)
    two = Nodes(tmp_path, plan)
    started = two.start()
    two.wait_for_step(5, started)
    os.kill(started[1].pid or 0, signal.SIGKILL)
    assert two.finish(started, 60)[0] == 1
    assert "error: another process of this run has ended" in two.log()
    assert two.finish(two.start("--resume")) == [0, 0], two.log()
    assert not (two.output(1) / ADAPTER_FILE).exists()
    text = two.log(0) + two.log(1)
    assert text.count("on fresh noise") == 1
    assert "find_unused_parameters" not in text
    assert_one_learns_the_same(bench, plan, two.output(0) / ADAPTER_FILE)


@pytest.mark.parametrize("kind", ["lora", pytest.param("lokr", marks=pytest.mark.slow)])
def test_sharded_weights_learn_as_one(bench, tmp_path, kind):
    bench = bench.changed(adapter=kind)
    plan = bench.plan(num_processes=2, strategy="fsdp2", num_steps=3)
    two = Nodes(tmp_path, plan)
    assert two.finish(two.start()) == [0, 0], two.log()
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
    monkeypatch.setattr("autotune.machine.probe.probe", lambda: free)
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


def launched(run_id="none", **changes):
    """The environment of the second of two processes of torchrun, on the second of two nodes."""
    numbers = {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    place = {"MASTER_ADDR": "node-1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": run_id}
    return {name: str(value) for name, value in {**numbers, **place, **changes}.items()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (launched(), Launch(1, 0, 2, 1, "node-1:29500")),
        (launched("autotune-7"), Launch(1, 0, 2, 1, "node-1:29500", is_own=True)),
        (launched(RANK=0, WORLD_SIZE=1, MASTER_ADDR="a"), Launch(0, 0, 1, 1, "a:29500")),
        ({}, None),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_torchruns_variables_are_understood(environment, expected):
    assert Launch.read(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        *(launched(RANK=rank) for rank in (2, -1, "x")),
        *(launched(LOCAL_RANK=1), launched(LOCAL_WORLD_SIZE=3)),
        *(launched(MASTER_PORT=70000), launched(MASTER_ADDR="")),
    ],
)
def test_a_contradiction_is_refused(environment):
    with pytest.raises(InvalidInput, match="name no process among others"):
        Launch.read(environment)


def test_other_numbers_than_planned_are_refused(monkeypatch):
    monkeypatch.setattr("os.environ", launched(OMPI_COMM_WORLD_SIZE=7))
    for number in (1, 3):
        with pytest.raises(InvalidInput, match=f"started 2 process.*plan is for {number}"):
            adopt_launch(number)
    assert adopt_launch(2) == Launch(1, 0, 2, 1, "node-1:29500")
    assert "OMPI_COMM_WORLD_SIZE" not in os.environ, "accelerate would believe it"


def ending(monkeypatch, how, file=None):
    def start(*arguments):
        if file:
            file.touch()
        if how:
            raise how

    place = "torch.distributed.launcher.api.elastic_launch"
    monkeypatch.setattr(place, lambda config, executable: start)
    folder = file.parent if file else Path("nowhere")
    return launch(2, ["train"], lambda: set(folder.glob("*")))


@pytest.mark.parametrize(
    ("code", "expected"), [(4, 4), (-signal.SIGKILL, 137), (-signal.SIGTERM, 143)]
)
def test_a_failed_process_gives_its_status(monkeypatch, code, expected):
    monkeypatch.setattr("os.environ", dict(os.environ))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="")
    assert ending(monkeypatch, ChildFailedError("train", {0: failure})) == expected


def test_signal_preempts_if_checkpoint_was_written(tmp_path, monkeypatch):
    """torch kills processes that take too long to write one."""
    monkeypatch.setattr("os.environ", dict(os.environ))
    stopped, file = SignalException("stopped", signal.SIGTERM), tmp_path / "checkpoint"
    assert ending(monkeypatch, stopped, file) == 75
    assert ending(monkeypatch, stopped, file) == 143


FORKS = "p = fork_server_context().Process(target=print); p.start(); p.join(); exit(p.exitcode)"
LAUNCHES = "exit(launch(2, ['-c', 'import json, threading, torch'], set))"


@pytest.mark.slow
@pytest.mark.parametrize("code", [FORKS, LAUNCHES])
def test_runs_ignore_the_current_folder(tmp_path, code):
    for name in ("autotune", *sys.stdlib_module_names):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(7)")
    command = [sys.executable, "-P", "-c", f"from autotune.system.process import *; {code}"]
    assert subprocess.run(command, cwd=tmp_path, timeout=300, check=False).returncode == 0
