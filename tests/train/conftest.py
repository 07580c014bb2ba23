"""One small model with its data, loaded once for the tests of the loop."""

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.data.cache import Cache
from autotune.data.dataset import read_dataset
from autotune.data.encode import EncodedDataset, Encoders, encode_dataset
from autotune.models.resolve import ResolvedModel, resolve_model
from autotune.plan.candidate import CachingSettings
from autotune.plan.file import seal
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.train.folder import Checkpoints, compute_run_key
from autotune.train.loop import TrainingLoop
from autotune.train.metrics import Metrics
from autotune.train.model import TrainingModel, load_model, save_trained
from autotune.train.monitor import Monitor
from autotune.train.prepare import SampleRequest, read_sample_inputs
from autotune.train.processes import Processes
from autotune.train.run import train
from autotune.train.sample import sample_run
from tests.events import steps_to
from tests.train.small import SETTINGS, machine, make_plan, write_model_and_images

CPU = torch.device("cpu")
PROMPT = "a red circle on a white background"


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
    workload: dict[str, Any] = field(default_factory=dict)  # what plans change of theirs

    def plan(self, **job):
        plan = make_plan(self.model_folder, self.images, self.hardware, **job)
        changed = plan.frozen.workload.changed(**self.workload)
        return seal(plan.job, plan.frozen.changed(workload=changed))

    def changed(self, settings=SETTINGS, **workload):
        bench = replace(self, workload=workload)
        trained = load_model(self.resolved, bench.plan().frozen.workload, settings, CPU, 3)
        return replace(bench, trained=trained, initial=values_of(trained.adapter))

    def train(self, plan, *arguments, **options):
        return train(plan, self.hardware, self.cache, *arguments, **options)

    def sample(self, run, **request):
        asked = SampleRequest(PROMPT, seed=5, **request)
        (written,) = sample_run(read_sample_inputs(run, asked), self.hardware, self.cache)
        return written

    def loop(
        self,
        plan,
        folder,
        *,
        kill_after=None,
        on_step=lambda event: None,
        preview=lambda step: None,
        held_out=0,
        monitor=None,
    ):
        """Resume what is there and run until the end, or until the process would be killed.

        `held_out` images are only left out if the plan's job names no validation.
        """
        items = self.encoded.items
        training = self.encoded.select(items[held_out:].__contains__)
        others = self.encoded.select(items[:held_out].__contains__)
        for parameter, value in zip(self.trained.adapter, self.initial, strict=True):
            parameter.data.copy_(value)

        def step(event):
            on_step(event)
            if event.step == kill_after:
                raise Killed

        job, key = plan.job, compute_run_key(plan, training.items, training.entries)
        every = job.checkpoints_keep_every * job.checkpointing_steps
        with Checkpoints(
            folder / "checkpoints", key, keep_last=job.checkpoints_total_limit, keep_every=every
        ) as checkpoints:
            checkpoint = checkpoints.newest()
            metrics = Metrics(folder, checkpoint.step if checkpoint else 0, report_to="none")
            loop = TrainingLoop(
                plan,
                self.trained,
                training,
                checkpoint,
                others if job.validation else None,
                processes=Processes(0, 1, CPU),
                checkpoints=checkpoints,
                metrics=metrics,
                on_event=steps_to(step),
                monitor=monitor or Monitor(CPU),
                preview=preview,
            )
            with contextlib.closing(metrics), contextlib.suppress(Killed):
                loop.run()
        return loop


def values_of(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def save(loop, file):
    """Write the adapter as a run that ends after this loop does."""
    known = loop.plan.frozen.workload, loop.plan.digest, loop.num_steps
    save_trained(file, loop.model, loop.optimizer, *known)
    return file


def kill_at(step):
    def kill(event):
        if event.step == step:
            raise Killed

    return steps_to(kill)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small models lose much with several threads if other work wants the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


def make_bench(folder, family="qwen-image"):
    model_folder, images = write_model_and_images(folder, family)
    hardware, resolved = machine(), resolve_model(ModelRef.of(model_folder))
    plan = make_plan(model_folder, images, hardware)
    settings, work, cache = plan.frozen.settings, plan.frozen.workload, folder / "cache"
    encoders = Encoders(resolved, CachingSettings(), CPU, settings.precision)
    data = read_dataset(images)
    drawn = {"caption_dropout": 0.1, "preserve_prior": 0.5}
    encoded = encode_dataset(encoders, data, work.buckets, Cache(cache), **drawn)
    trained = load_model(resolved, work, settings, CPU, plan.job.seed)
    initial = values_of(trained.adapter)
    return Bench(model_folder, images, cache, hardware, resolved, trained, encoded, initial)


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    return make_bench(tmp_path_factory.mktemp("bench"))
