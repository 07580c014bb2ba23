"""One small model with its data, loaded once for the tests of the loop."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.data.cache import Cache
from autotune.data.dataset import read_dataset
from autotune.data.encode import EncodedDataset, Encoders, encode_dataset
from autotune.events import StepFinished
from autotune.models.resolve import ResolvedModel, resolve_model
from autotune.plan.candidate import CachingSettings
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.plan import TrainingPlan
from autotune.train.checkpoint import Checkpoints
from autotune.train.folder import compute_run_key
from autotune.train.loop import TrainingLoop
from autotune.train.metrics import Metrics
from autotune.train.model import TrainingModel, load_model
from autotune.train.monitor import Monitor
from autotune.train.processes import Processes
from tests.events import steps_to
from tests.train.small import machine, make_plan, write_model_and_images

CPU = torch.device("cpu")


class Killed(Exception):
    """Stands for the end of a process."""


@dataclass(frozen=True)
class Bench:
    """A model whose adapter is put back to its start for every loop, and encoded data."""

    model_folder: Path
    images: Path
    cache: Path
    hardware: HardwareProfile
    resolved: ResolvedModel
    trained: TrainingModel
    encoded: EncodedDataset
    initial: list[torch.Tensor]

    def plan(self, **job: Any) -> TrainingPlan:
        return make_plan(self.model_folder, self.images, self.hardware, **job)

    def loop(
        self,
        plan: TrainingPlan,
        folder: Path,
        *,
        kill_after: int | None = None,
        on_step: Callable[[StepFinished], None] = lambda event: None,
        preview: Callable[[int], None] = lambda step: None,
        held_out: int = 0,
        monitor: Monitor | None = None,
    ) -> TrainingLoop:
        """Run until the end, or until the process would have been killed in the given step; resumes
        what is there.

        So many of the images are held out if the plan's job names a validation, and else only left
        out.
        """
        items = self.encoded.items
        training = self.encoded.select(items[held_out:].__contains__)
        validation = (
            self.encoded.select(items[:held_out].__contains__) if plan.job.validation else None
        )
        for parameter, value in zip(self.trained.adapter, self.initial, strict=True):
            parameter.data.copy_(value)

        def step(event: StepFinished) -> None:
            on_step(event)
            if event.step == kill_after:
                raise Killed

        key = compute_run_key(plan, training.items, training.entries)
        keep_every = plan.job.checkpoints_keep_every * plan.job.checkpointing_steps
        with Checkpoints(
            folder / "checkpoints",
            key,
            keep_last=plan.job.checkpoints_total_limit,
            keep_every=keep_every,
        ) as checkpoints:
            checkpoint = checkpoints.newest()
            metrics = Metrics(
                folder, resumed_at=checkpoint.step if checkpoint else 0, report_to="none"
            )
            loop = TrainingLoop(
                plan, self.trained, training, checkpoint, validation,
                processes=Processes(0, 1, CPU), checkpoints=checkpoints, metrics=metrics,
                on_event=steps_to(step), monitor=monitor or Monitor(CPU), preview=preview,
            )  # fmt: skip
            with contextlib.closing(metrics), contextlib.suppress(Killed):
                loop.run()
        return loop


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models gain nothing from several threads, and lose much where other work wants the
    cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    model_folder, images = write_model_and_images(folder)
    hardware, resolved = machine(), resolve_model(ModelRef.of(model_folder))
    plan = make_plan(model_folder, images, hardware)
    encoded = encode_dataset(
        Encoders(resolved, CachingSettings(), plan.frozen.settings, CPU),
        read_dataset(images),
        plan.frozen.workload.buckets,
        Cache(folder / "cache"),
        caption_dropout=0.1,
    )
    trained = load_model(resolved, plan.frozen.workload, plan.frozen.settings, CPU, plan.job.seed)
    initial = [parameter.detach().clone() for parameter in trained.adapter]
    return Bench(
        model_folder, images, folder / "cache", hardware, resolved, trained, encoded, initial
    )
