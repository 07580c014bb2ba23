"""Samples images through the stock pipeline, with and without the adapter: the proof that others can load it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.errors import AutotuneError, InvalidInput
from autotune.families.resolve import ResolvedModel
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Preview:
    """One prompt, sampled from the same noise with and without the adapter."""

    with_adapter: "list[Image]"
    """One image, or the frames of a clip."""
    without_adapter: "list[Image]"


def load_pipeline(model: ResolvedModel, dtype: torch.dtype, device: torch.device, **parts: Any) -> Any:
    """The stock pipeline from the model's folder; `parts` replaces components (None leaves one out)."""
    if model.folder is None:
        raise InvalidInput(
            f"the weights of {model.spec.name} are not on this machine",
            hint=f"download {model.family.hub_id} and pass its folder: --model FOLDER",
        )
    return model.family.load_pipeline(model.folder, torch_dtype=dtype, **parts).to(device)


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

    def sample() -> "list[Image]":
        return model.family.sample(pipeline, prompt, bucket, num_steps=num_steps, seed=seed)

    without = sample()
    pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name)
    if not pipeline.get_active_adapters():
        raise AutotuneError(f"{adapter} could not be loaded back", hint="this is a bug in autotune: please report it")
    return Preview(with_adapter=sample(), without_adapter=without)
