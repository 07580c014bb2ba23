"""Builds what is trained: the transformer with its frozen weights as the settings say, and the adapter on it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autotune.errors import InvalidInput
from autotune.families.adapter import add_adapter
from autotune.families.base import Family
from autotune.families.resolve import ResolvedModel
from autotune.knobs.precision import torch_dtype
from autotune.knobs.registry import KNOBS
from autotune.schema import Candidate, Workload


@dataclass
class TrainingModel:
    """A transformer with an adapter, ready for `optimizer_step`."""

    family: Family
    transformer: nn.Module
    adapter: list[nn.Parameter]
    device: torch.device
    dtype: torch.dtype


def load_model(
    model: ResolvedModel, workload: Workload, settings: Candidate, device: torch.device, seed: int
) -> TrainingModel:
    """Load the transformer, quantise it, add the adapter, and apply all other settings.

    Raises:
        InvalidInput: the model has no files here, or they are damaged.
    """
    dtype = torch_dtype(settings.precision)
    transformer = _load_transformer(model, dtype).to(device)
    knobs = {knob.name: knob for knob in KNOBS}
    knobs["quantization"].apply(transformer, model.family, settings.quantization)
    adapter = add_adapter(
        model.family,
        transformer,
        rank=workload.rank,
        lora_alpha=workload.lora_alpha,
        targets=workload.targets,
        dtype=dtype,
        seed=seed,
    )
    loaded = TrainingModel(model.family, transformer.to(device), adapter, device, dtype)
    apply_settings(loaded, settings)
    return loaded


def apply_settings(model: TrainingModel, settings: Candidate) -> None:
    """Apply the settings that need no reload; may be called again with others."""
    for knob in KNOBS:
        if not knob.needs_reload:
            knob.apply(model.transformer, model.family, getattr(settings, knob.name))


def _load_transformer(model: ResolvedModel, dtype: torch.dtype) -> Any:
    import diffusers

    if model.folder is None:
        raise InvalidInput(
            f"the weights of {model.spec.name} are not on this machine",
            hint=f"download {model.family.hub_id} and pass its folder: --model FOLDER",
        )
    cls = getattr(diffusers, model.family.transformer_class)
    try:
        transformer = cls.from_pretrained(model.folder / "transformer", torch_dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            f"cannot load the transformer in {model.folder}: {str(error).splitlines()[0]}",
            hint="download the model again; a file is missing or damaged",
        ) from error
    return transformer


def synthetic_samples(model: ResolvedModel, workload: Workload, count: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Random samples in the largest shapes of the workload: what a trial trains on."""
    shapes = model.family.sample_shapes(model.config, workload.largest_bucket, workload.max_text_tokens)
    generator = torch.Generator().manual_seed(0)
    samples = [
        {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        for _ in range(count)
    ]
    if workload.text_padding == "masked":  # uneven lengths, so that batches carry the mask that training's will
        for sample in samples[1::2]:
            sample["prompt_embeds"] = sample["prompt_embeds"][:-1]
    return samples
