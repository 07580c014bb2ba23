"""What several families share: latents as tokens, control images, tokenizers, and the VAE of
FLUX.1."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.system.process import lazy_module

if TYPE_CHECKING:
    import diffusers
    from torch import Tensor
else:
    diffusers = lazy_module("diffusers")


FLUX_VAE: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""The autoencoder of FLUX.1, which Chroma and Kandinsky 5.0 Image use, too."""


def encode_standardized(vae: Any, pixels: Tensor) -> Tensor:
    """Latents (channels, frames, height, width), each channel with the mean and the deviation
    that the VAE states."""
    mean = pixels.new_tensor(vae.config.latents_mean).view(-1, 1, 1, 1)
    std = pixels.new_tensor(vae.config.latents_std).view(-1, 1, 1, 1)
    latents: Tensor = vae.encode(pixels[None].to(vae.dtype)).latent_dist.mode()[0]
    return (latents.to(pixels.dtype) - mean) / std


class ImageLatents:
    """The latents of families whose autoencoder is one of images alone, and knows no frames."""

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        """Latents (channels, 1, height, width) of the first frame of `pixels`, shifted and
        scaled as the VAE says."""
        vae = pipeline.vae
        latents: Tensor = vae.encode(pixels[:, 0][None].to(vae.dtype)).latent_dist.mode()[
            0, :, None
        ]
        shift, scale = float(vae.config.shift_factor or 0.0), float(vae.config.scaling_factor)
        return (latents.to(pixels.dtype) - shift) * scale

    def decodable(self, latents: Tensor) -> Tensor:
        return latents[:, :, 0]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)


def count_tokens(folder: Path, texts: Sequence[str]) -> list[int]:
    """Length of each text in tokens, by the tokenizer in a model's folder."""
    return [len(ids) for ids in load_tokenizer(folder)(list(texts))["input_ids"]]


def count_chat_tokens(folder: Path, captions: Sequence[str], *, enable_thinking: bool) -> list[int]:
    """Length of each caption as a user's message in the chat template of a model's tokenizer."""
    tokenizer = load_tokenizer(folder)
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": enable_thinking}
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": caption}], **options)
        for caption in captions
    ]
    return [len(ids) for ids in tokenizer(chats)["input_ids"]]


VAE_FACTOR = 8
"""Pixels per latent, along each side."""


PATCH = 2
"""Latents per token, along each side."""


ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
"""Attention layers of a double-stream block: the image's, then the text's."""


CONTROL = "control_latents_"
"""Prefix of control images in a sample, before a number from 1; nine at most, so that names sort
in order."""


def with_controls(noisy: Tensor, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """What tokens are made of: the noisy latents, then those of a batch's control images in
    their dtype."""
    return [
        noisy,
        *(batch[name].to(noisy.dtype) for name in sorted(batch) if name.startswith(CONTROL)),
    ]


def pack(latents: Tensor) -> Tensor:
    """One token per 2x2 patch: (batch, channels, 1, height, width) -> (batch, height/2 * width/2,
    channels * 4).

    A token holds its channels outermost, then rows, then columns: the order of `_pack_latents` in
    diffusers' FLUX and Qwen-Image pipelines.
    """
    size, channels, _, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = latents.view(size, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(size, rows * columns, channels * PATCH**2)


def unpack(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack`; `shape` is that of the latents."""
    size, channels, _, height, width = shape
    patches = tokens.view(size, height // PATCH, width // PATCH, channels, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(*shape)


def build_empty_pipeline(pipeline_class: str) -> Any:
    """A stock pipeline without components: for what its constructor sets, such as its prompt
    template."""
    stock = getattr(diffusers, pipeline_class)
    parameters = inspect.signature(stock).parameters.values()
    return stock(**{each.name: None for each in parameters if each.default is each.empty})
