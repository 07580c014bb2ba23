"""Two nodes, each with a home and an output folder of its own, started as SLURM's srun starts
them.
"""

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import write_plan
from autotune.schema.run import RunReport
from autotune.training.adapter_file import save_trained
from autotune.training.files import ADAPTER_FILE
from autotune.training.metrics import read_metrics
from tests.forked import start_forked
from tests.runtime.test_launchers import in_slurm
from tests.training.conftest import Bench

NUM_STEPS = 12


@dataclass(frozen=True)
class TwoNodes:
    folder: Path
    plan: TrainingPlan

    def start(
        self, *flags: str, number: int = 2, job: int = 0, step_wait_seconds: float | None = None
    ) -> list[ForkServerProcess]:
        write_plan(self.folder / "plan.yaml", self.plan)
        port, started = free_port(), []
        for rank in range(number):
            home = self.folder / f"home-{rank}"
            environment = in_slurm(
                SLURM_PROCID=rank, SLURM_LOCALID=0, SLURM_NODEID=rank, SLURM_STEP_NUM_TASKS=number,
                SLURM_STEP_TASKS_PER_NODE=f"1(x{number})", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                XDG_CACHE_HOME=home / "cache", XDG_DATA_HOME=home / "data",
            )  # fmt: skip
            words = (
                "--progress",
                "none",
                "train",
                self.folder / "plan.yaml",
                *flags,
                "--output",
                self.output(rank),
            )
            started.append(
                start_forked(
                    words,
                    self.log(rank),
                    environment=environment,
                    step_wait_seconds=step_wait_seconds,
                )
            )
        return started

    def output(self, rank: int) -> Path:
        return self.folder / f"output-{rank}"

    def log(self, rank: int) -> Path:
        return self.folder / f"log-{rank}"

    def wait_for_step(self, step: int, started: list[ForkServerProcess]) -> None:
        deadline = time.monotonic() + 120
        while len(read_metrics(self.output(0) / "metrics.jsonl")) < step:
            assert all(process.is_alive() for process in started), self.log(0).read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def finish(
        self, started: list[ForkServerProcess], within_seconds: float = 120
    ) -> list[int | None]:
        """Exit statuses, once all have ended."""
        deadline = time.monotonic() + within_seconds
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        try:
            return [process.exitcode for process in started]
        finally:
            for process in started:
                process.kill()


@pytest.fixture
def two(bench: Bench, tmp_path: Path) -> TwoNodes:
    return TwoNodes(
        tmp_path, bench.plan(num_processes=2, num_steps=NUM_STEPS, checkpointing_steps=2)
    )


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_two_nodes_learn_what_one_process_learns_and_a_killed_one_is_missed(
    bench: Bench, two: TwoNodes
) -> None:
    started = two.start()
    two.wait_for_step(5, started)
    os.kill(started[1].pid or 0, signal.SIGKILL)
    killed_at = time.monotonic()
    assert two.finish(started)[0] == 1
    assert time.monotonic() - killed_at < 60
    assert "error: another process of this run has ended" in two.log(0).read_text()
    assert "hint: look at what the other processes and nodes printed" in two.log(0).read_text()
    assert two.finish(two.start("--resume")) == [0, 0], two.log(0).read_text()
    assert not (two.output(1) / ADAPTER_FILE).exists()
    text = two.log(0).read_text() + two.log(1).read_text()
    assert text.count("loss on fresh noise") == 1  # the first process alone reports
    assert "find_unused_parameters" not in text
    losses: list[float] = []
    one = bench.loop(two.plan, two.folder / "one", on_step=lambda event: losses.append(event.loss))
    assert [row.loss for row in read_metrics(two.output(0) / "metrics.jsonl")] == pytest.approx(
        losses, abs=1e-5
    )
    save_trained(
        two.folder / ADAPTER_FILE,
        one.model,
        one.optimizer,
        two.plan.frozen.workload,
        two.plan.digest,
        NUM_STEPS,
    )
    left, right = load_file(two.output(0) / ADAPTER_FILE), load_file(two.folder / ADAPTER_FILE)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_weights_sharded_over_two_nodes_go_on_with_an_adapter_and_are_measured_on_images_held_out(
    bench: Bench, tmp_path: Path
) -> None:
    before = bench.loop(bench.plan(num_steps=2), tmp_path / "before")
    workload, earlier, held_out = (
        before.plan.frozen.workload,
        tmp_path / "earlier.safetensors",
        tmp_path / "held-out",
    )
    save_trained(earlier, before.model, before.optimizer, workload, "sha256:0", 2)
    begun = replace(
        bench, initial=[parameter.detach().clone() for parameter in bench.trained.adapter]
    )
    held_out.mkdir()
    Image.new("RGB", (40, 40), "teal").save(held_out / "a.png")
    (held_out / "a.txt").write_text("a red circle")
    own = {
        "validation": str(held_out),
        "validation_every": 2,
        "keep_best": True,
        "from_adapter": str(earlier),
    }
    plan = bench.plan(num_processes=2, num_nodes=2, strategy="fsdp2", num_steps=4, **own)
    two = TwoNodes(tmp_path, plan)
    assert two.finish(two.start()) == [0, 0], two.log(0).read_text() + two.log(1).read_text()
    losses: list[float] = []
    one = begun.loop(
        plan.changed(job=plan.job.changed(validation=None)),
        tmp_path / "one",
        on_step=lambda e: losses.append(e.loss),
    )
    rows = read_metrics(two.output(0) / "metrics.jsonl")
    assert [row.loss for row in rows] == pytest.approx(losses, abs=1e-5)
    assert [row.step for row in rows if row.validation_loss is not None] == [2, 4]
    assert two.log(0).read_text().count("loss on 1 held-out image") == 1
    report = RunReport.model_validate_json((two.output(0) / "report.json").read_bytes())
    assert report.validation is not None
    if report.validation.kept_step == 4:
        save_trained(tmp_path / ADAPTER_FILE, one.model, one.optimizer, workload, plan.digest, 4)
        left, right = load_file(two.output(0) / ADAPTER_FILE), load_file(tmp_path / ADAPTER_FILE)
        assert all(torch.allclose(left[name], right[name], rtol=1e-3, atol=1e-5) for name in right)


def test_a_process_that_hangs_is_noticed(two: TwoNodes) -> None:
    started = two.start(step_wait_seconds=3)
    two.wait_for_step(3, started)
    os.kill(started[1].pid or 0, signal.SIGSTOP)
    assert two.finish(started[:1], within_seconds=60) == [1]
    assert "error: another process of this run does not answer" in two.log(0).read_text()
    started[1].kill()


@pytest.mark.parametrize("number", [3])
def test_more_tasks_than_the_plan_has_processes_train_nothing(two: TwoNodes, number: int) -> None:
    assert two.finish(two.start(number=number)) == [2] * number
    assert "srun started 3 process(es), but the plan is for 2" in two.log(2).read_text()
    assert not two.output(0).exists()
