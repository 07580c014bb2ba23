"""Small pipelines of every family, and one training item for each."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from autotune.models.adapter import add_adapter
from autotune.models.family import Family
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.plan.workload import Bucket, WorkloadRequest
from autotune.train.workload import describe_workload
from tests.small import shortest_clip, write_small_pipeline

CAPTIONS = ("a red circle on white", "a small blue square, left of a green line")
NO_GUIDANCE = {"z-image": 0.0, "krea-2": 0.0}  # which calls the transformer once a step, if not 1


@dataclass(frozen=True)
class Small:
    family: Family
    folder: Path
    pipeline: Any

    @property
    def transformer(self):
        return getattr(self.pipeline, self.family.denoiser)

    def stock(self):
        kind, components = getattr(diffusers, self.family.pipeline_class), self.pipeline.components
        if not issubclass(kind, diffusers.ModularPipeline):
            return type(self.pipeline)(**components)
        blocks = getattr(diffusers, kind.default_blocks_name)()
        for name in self.family.unused_blocks:
            blocks.sub_blocks.pop(name)
        stock = kind(blocks)
        names = components.keys() & set(stock.pretrained_component_names)
        stock.update_components(**{name: components[name] for name in names})
        return stock

    @property
    def bucket(self):
        frames = shortest_clip(self.family)
        width = 48 if 48 % self.family.size_multiple_px == 0 else 96
        return Bucket(width_px=width, height_px=64, num_frames=frames, num_items=1)

    def pixels(self, bucket, seed=0):
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.rand(3, bucket.num_frames, 4, 4, generator=generator)
        size = (bucket.height_px, bucket.width_px)
        return nn.functional.interpolate(coarse, size=size, mode="bilinear") * 2 - 1

    def shown(self, pixels):
        if self.family.name == "minimax-h3":
            return ((pixels + 1) / 2 - self._color(0)) / self._color(1)
        is_rgba = type(self.pipeline.vae).__name__ == "AutoencoderKLQwenImage21"
        return torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1) if is_rgba else pixels

    def seen(self, decoded):
        if self.family.name == "minimax-h3":
            return decoded * self._color(1) + self._color(0)
        return (decoded + 1) / 2

    def _color(self, which):
        values = (self.pipeline.pixel_mean, self.pipeline.pixel_std)[which]
        return torch.tensor(values).view(-1, 1, 1, 1)

    def controls(self, bucket):
        seeds = range(10, 10 + self.family.max_controls)
        return [self.pixels(bucket, seed)[:, :1] for seed in seeds]

    @torch.no_grad()
    def sample(self, caption=CAPTIONS[0], bucket=None):
        bucket = bucket or self.bucket
        controls = self.controls(bucket)
        encoded = self.family.encode_caption(self.pipeline, caption, controls)
        for number, control in enumerate(controls, start=1):
            encoded[f"control_latents_{number}"] = self.family.encode_pixels(self.pipeline, control)
        return {**encoded, **self.family.encode_item(self.pipeline, self.pixels(bucket))}

    def levels(self, *shares):
        return torch.tensor([self.family.noise.level(share) for share in shares])

    def workload(self, targets="attention"):
        request = WorkloadRequest(rank=4, lora_alpha=4.0, targets=targets)
        return describe_workload(resolve_model(ModelRef.of(self.folder)), None, request)

    def adapted(self, targets="attention"):
        """A copy of the transformer with an adapter that is not zero."""
        transformer = copy.deepcopy(self.transformer)
        workload = self.workload(targets)
        parameters = add_adapter(self.family, transformer, workload, torch.float32, seed=1)
        generator = torch.Generator().manual_seed(2)
        for parameter in parameters:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        return transformer, parameters


def mask_padding(pipeline, monkeypatch):
    """Let Chroma's pipeline mask what it should (huggingface/diffusers#13619)."""
    stock = pipeline._get_t5_prompt_embeds

    def encode(*args, **options):
        prompt, mask = stock(*args, **options)
        return prompt, mask > 0

    monkeypatch.setattr(pipeline, "_get_t5_prompt_embeds", encode)


def make_small(family, folder):
    write_small_pipeline(family, folder, CAPTIONS)
    pipeline = family.load_pipeline(folder)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    return Small(family, folder, pipeline)
