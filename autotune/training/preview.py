"""Samples images through the stock pipeline, with and without the adapter: the proof that others can load it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.errors import AutotuneError
from autotune.families.resolve import ResolvedModel
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Preview:
    """One prompt, sampled from the same noise with and without the adapter."""

    with_adapter: "Image"
    without_adapter: "Image"


def load_pipeline(model: ResolvedModel, dtype: torch.dtype, device: torch.device, **parts: Any) -> Any:
    """The stock pipeline from the model's folder; `parts` replaces components (None leaves one out)."""
    import diffusers

    cls = getattr(diffusers, model.family.pipeline_class)
    return cls.from_pretrained(model.folder, torch_dtype=dtype, **parts).to(device)


def sample_preview(
    model: ResolvedModel,
    adapter: Path,
    prompt: str,
    bucket: Bucket,
    *,
    num_steps: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Preview:
    """Load the adapter back through the pipeline's own loader and sample with and without it.

    Raises:
        AutotuneError: the pipeline did not take the adapter.
    """
    pipeline = load_pipeline(model, dtype, device)
    pipeline.set_progress_bar_config(disable=True)

    def sample() -> "Image":
        image: Image = pipeline(
            prompt=prompt,
            width=bucket.width_px,
            height=bucket.height_px,
            num_inference_steps=num_steps,
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
        return image

    without = sample()
    pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name)
    if not pipeline.get_active_adapters():
        raise AutotuneError(f"{adapter} could not be loaded back", hint="this is a bug in autotune: please report it")
    return Preview(with_adapter=sample(), without_adapter=without)
