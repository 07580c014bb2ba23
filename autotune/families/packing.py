"""What families have in common: sizes of latents and tokens, FLUX's and Qwen-Image's packing and
joint attention.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VAE_FACTOR = 8
"""Pixels per latent, along each side."""
PATCH = 2
"""Latents per token, along each side."""
ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
"""Attention layers of a double-stream block: the image's, then the text's."""
CONTROL = "control_latents_"
"""Prefix of control images in a sample, before a number from 1; nine at most, so that names sort
in order.
"""


def with_controls(noisy: "Tensor", batch: "Mapping[str, Tensor]") -> "list[Tensor]":
    """What tokens are made of: the noisy latents, then those of a batch's control images in
    their dtype.
    """
    return [
        noisy,
        *(batch[name].to(noisy.dtype) for name in sorted(batch) if name.startswith(CONTROL)),
    ]


def pack(latents: "Tensor") -> "Tensor":
    """One token per 2x2 patch: (batch, channels, 1, height, width) -> (batch, height/2 * width/2,
    channels * 4).

    A token holds its channels outermost, then rows, then columns: the order of `_pack_latents` in
    diffusers' FLUX and Qwen-Image pipelines.
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
