"""Latents as sequences of 2x2 patches, and samples as batches: what families of transformers share. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from autotune.families.base import Batch, Sample

PATCH = 2


def pack(latents: "Tensor") -> "Tensor":
    """One token per 2x2 patch: (batch, channels, 1, height, width) -> (batch, height/2 * width/2, channels * 4).

    A token holds its channels outermost, then rows, then columns: the order of `_pack_latents` in diffusers' FLUX and
    Qwen-Image pipelines.
    """
    size, channels, _, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = latents.view(size, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(size, rows * columns, channels * PATCH**2)


def unpack(tokens: "Tensor", shape: Sequence[int]) -> "Tensor":
    """The inverse of `pack`; `shape` is that of the latents."""
    size, channels, _, height, width = shape
    patches = tokens.view(size, height // PATCH, width // PATCH, channels, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(*shape)


def collate_samples(samples: Sequence["Sample"]) -> "Batch":
    """Stack every tensor; prompts are padded with zeros at the end to the longest.

    Where prompts differ in length, `prompt_mask` (batch, longest) is True on their own tokens.

    Raises:
        RuntimeError: other tensors differ in shape: the samples are not of one bucket.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name != "prompt_embeds"}
    prompts = [sample["prompt_embeds"] for sample in samples]
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == max(lengths):
        return {**batch, "prompt_embeds": torch.stack(prompts)}
    positions = torch.arange(max(lengths), device=prompts[0].device)
    batch["prompt_mask"] = positions[None] < torch.tensor(lengths, device=positions.device)[:, None]
    return {**batch, "prompt_embeds": pad_sequence(prompts, batch_first=True)}
