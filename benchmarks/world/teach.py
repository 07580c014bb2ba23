"""Teach the demo's shape many times in one process, with the program's own loading, noise, step and
optimizer."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autotune.demo.lesson import (
    NEW_SHAPE,
    OWN_GUIDANCE,
    SMALL_WORLD,
    TAUGHT_REPEATS,
    known_scenes,
    load_pipeline,
    sample_images,
    score_images,
    show_to_vae,
    taught_scenes,
)
from autotune.demo.world import Scene
from autotune.models.family import PRIOR
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import WorkloadRequest
from autotune.train.model import load_model
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.step import Noising, optimizer_step, to_device
from autotune.train.workload import describe_workload

CPU = torch.device("cpu")
PLAIN = Candidate(micro_batch_size=4, checkpointed_blocks=0, precision="fp32")


@dataclass(frozen=True)
class Job:
    """What is chosen about learning."""

    rate: float = 4e-3
    steps: int = 300
    rank: int = 16
    targets: str = "attention+mlp"
    batch: int = 8
    repeats: int = TAUGHT_REPEATS
    """How often each of the twelve is seen per epoch."""
    own: int = 48
    """Number of images that the model draws itself."""
    shift: float = 1.0
    decay: float = 1e-3
    cosine: int = 1
    """1 if the rate falls to zero along a cosine."""
    guidance: float = OWN_GUIDANCE
    """With which the model draws these."""
    shape: str = NEW_SHAPE
    preserve: float = 0.0
    """Share of images that preserve the base's prediction of a caption in `prior`."""
    prior: tuple[str, ...] = ()


@dataclass
class Classroom:
    """The pretrained model and encoded images."""

    folder: Path = SMALL_WORLD
    encoded: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.resolved = resolve_model(ModelRef.of(self.folder))
        self.family, self.pipeline = self.resolved.family, load_pipeline(self.folder)
        self.own: dict = {}

    @torch.no_grad()
    def encode(self, scenes: Sequence[Scene], images: Sequence) -> list[dict[str, torch.Tensor]]:
        pixels = self.pipeline.image_processor.preprocess(list(images))
        return [
            {"latents": self.family.encode_pixels(self.pipeline, one[:, None])}
            | self.family.encode_caption(self.pipeline, scene.caption)
            for one, scene in zip(pixels, scenes, strict=True)
        ]

    def draw_own(self, guidance: float) -> list[dict[str, torch.Tensor]]:
        if guidance not in self.own:
            known = known_scenes()[0]
            images = sample_images(self.pipeline, [scene.caption for scene in known], 0, guidance)
            self.own[guidance] = self.encode(known, images)
        return self.own[guidance]

    def images(self, job: Job) -> list[dict[str, torch.Tensor]]:
        if job.shape not in self.encoded:
            scenes = taught_scenes(job.shape)
            self.encoded[job.shape] = self.encode(scenes, [scene.draw() for scene in scenes])
        return self.encoded[job.shape] * job.repeats + self.draw_own(job.guidance)[: job.own]

    def teach(self, job: Job, settings: Candidate = PLAIN, seed: int = 0) -> torch.nn.Module:
        """A transformer with an adapter that has learned, on plain weights whatever it was
        trained on."""
        wishes = WorkloadRequest(
            resolution=(64, 64), rank=job.rank, targets=job.targets, quality="compact"
        )
        workload = describe_workload(self.resolved, None, wishes)
        model = load_model(self.resolved, workload, settings, CPU, seed)
        optimizer = AdapterOptimizer(
            model.adapter, learning_rate=job.rate, weight_decay=job.decay, max_grad_norm=1.0
        )
        noising, images, rng = Noising(seed, job.shift), self.images(job), random.Random(seed)
        marker = {PRIOR: torch.ones(())}
        with torch.no_grad():
            priors = [self.family.encode_caption(self.pipeline, one) | marker for one in job.prior]
        drawing = random.Random(f"{seed} priors")
        queue: list[dict[str, torch.Tensor]] = []
        for step in range(job.steps):
            while len(queue) < job.batch:
                queue += rng.sample(images, len(images))
            fall = (1 + math.cos(math.pi * step / job.steps)) / 2 if job.cosine else 1
            optimizer.inner.param_groups[0]["lr"] = job.rate * fall
            picked, queue = queue[: job.batch], queue[job.batch :]
            size = settings.micro_batch_size
            if job.preserve:
                picked = [
                    one | drawing.choice(priors) if drawing.random() < job.preserve else one
                    for one in picked
                ]
            kinds = [[one for one in picked if (PRIOR in one) is kind] for kind in (False, True)]
            parts = [
                own[start : start + size] for own in kinds for start in range(0, len(own), size)
            ]
            batches = [
                {name: torch.stack([one[name] for one in part]) for name in part[0]}
                for part in parts
            ]
            batches = [to_device(batch, CPU, model.dtype) for batch in batches]
            optimizer_step(
                self.family, model.transformer, optimizer, batches, noising=noising, step=step,
                effective_batch_size=job.batch,
            )  # fmt: skip
        plain = load_model(self.resolved, workload, PLAIN, CPU, seed)
        for theirs, ours in zip(plain.adapter, optimizer.masters, strict=True):
            theirs.data.copy_(ours.data)
        return plain.transformer

    def fidelity(
        self, transformer: torch.nn.Module | None, scenes: Sequence[Scene], first_seed: int
    ) -> float:
        """As a share of what the VAE shows; None for the model as it was."""
        kept = self.pipeline.transformer
        self.pipeline.transformer = transformer or kept
        images = sample_images(self.pipeline, [scene.caption for scene in scenes], first_seed)
        self.pipeline.transformer = kept
        best = show_to_vae(self.pipeline, [scene.draw() for scene in scenes])
        return sum(score_images(scenes, images)) / sum(score_images(scenes, best))
