"""Steps that families share: latents as tokens, control images, tokenizers, and FLUX.1's VAE."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from autotune.system.lazy import Tensor, diffusers, torch

# Attention layers of a double-stream block: the image's, then the text's.
ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
CONTROL = "control_latents_"  # in a sample, before a number of one digit, so that names sort
PATCH = 2  # latents per token of `pack`, along each side


class ImageLatents:
    """The latents of families whose autoencoder is one of images alone, and knows no frames."""

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        images = pixels[:, 0][None].to(vae.dtype)
        latents: Tensor = vae.encode(images).latent_dist.mode()[0, :, None].to(pixels.dtype)
        return (latents - float(vae.config.shift_factor or 0.0)) * float(vae.config.scaling_factor)

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        return latents[:, :, 0]


def adapted_layers(block: str, attention: str, mlp: str, others: str = "") -> dict[str, str]:
    """Name the sets of layers of a `block` that can be adapted."""
    both = f"{attention}|{mlp}"
    everything = f"{both}|{others}" if others else both
    sets = {"attention": attention, "attention+mlp": both, "all-linear": everything}
    return {name: rf"{block}\.({layers})" for name, layers in sets.items()}


def load_tokenizer(folder: Path, name: str = "tokenizer") -> Any:
    """Load a tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / name, trust_remote_code=False)


def count_tokens(folder: Path, texts: Sequence[str]) -> list[int]:
    """Count the tokens of each text, by the tokenizer in a model's folder."""
    return [len(ids) for ids in load_tokenizer(folder)(list(texts))["input_ids"]]


def as_chats(tokenizer: Any, prompts: Sequence[Any], **options: bool) -> list[str]:
    """Put each prompt into the chat template of a tokenizer, as the question to be answered."""
    options |= {"tokenize": False, "add_generation_prompt": True}
    chats = ([{"role": "user", "content": prompt}] for prompt in prompts)
    return [tokenizer.apply_chat_template(chat, **options) for chat in chats]


@cache
def image_processor(kind: str) -> Any:
    """Make a processor of Qwen's without its video part, which needs torchvision."""
    import transformers
    from transformers.processing_utils import ProcessorMixin

    stock = getattr(transformers, kind)

    class Processor(stock):  # type: ignore[misc, valid-type]
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
            for name in ("image", "video"):
                token = f"<|{name}_pad|>"
                setattr(self, f"{name}_token", token)
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

        def num_image_tokens(self, width_px: int, height_px: int) -> int:
            num_patches = self.image_processor.get_number_of_image_patches(height_px, width_px)
            return int(num_patches) // int(self.image_processor.merge_size) ** 2

    # diffusers writes both into model_index.json: a saved pipeline must name the stock class.
    Processor.__name__, Processor.__module__ = kind, stock.__module__
    return Processor


class QwenProcessor:
    """The processor of families whose text encoder is one of Qwen's that see."""

    processor: ClassVar[tuple[str, str]]  # the component that it is, and its class

    def load_processor(self, folder: Path) -> Any:
        """Load the processor of the model in `folder`."""
        name, kind = self.processor
        return image_processor(kind).from_pretrained(folder / name, trust_remote_code=False)

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        stock: Any = super()
        components = {self.processor[0]: self.load_processor(folder), **components}
        return stock.load_pipeline(folder, **components)


def with_controls(noisy: Tensor, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the noisy latents, then those of a batch's control images in their dtype."""
    names = sorted(name for name in batch if name.startswith(CONTROL))
    return [noisy, *(batch[name].to(noisy.dtype) for name in names)]


def pack(latents: Tensor) -> Tensor:
    """Make tokens (batch, patches, channels * 4) of 2x2 patches, in the order of diffusers'
    `_pack_latents`: channels outermost, then rows, then columns."""
    size, channels, _, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = latents.view(size, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(size, rows * columns, channels * PATCH**2)


def unpack(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `pack`; `shape` is that of the latents."""
    size, channels, _, height, width = shape
    patches = tokens.view(size, height // PATCH, width // PATCH, channels, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(*shape)


def send(drawn: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`, to a GPU from page-locked memory, so that the host need not wait for it."""
    return (drawn.pin_memory() if device.type == "cuda" else drawn).to(device, non_blocking=True)


def build_empty_pipeline(pipeline_class: str) -> Any:
    """Build a stock pipeline without components, for what its constructor sets."""
    stock = getattr(diffusers, pipeline_class)
    parameters = inspect.signature(stock).parameters.values()
    return stock(**{each.name: None for each in parameters if each.default is each.empty})
