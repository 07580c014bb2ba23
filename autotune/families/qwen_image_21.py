"""Qwen-Image 2.1: one causal stream of text and image in 32 blocks, Qwen3-VL as text encoder, an
autoencoder of RGBA.

Text attends to the text before it, the image to all of it. Text counts as clean, so only the
image's tokens are modulated by the noise. The pipeline edits images, too, with the same weights;
autotune trains it on text alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.families.base import (
    Batch,
    Config,
    Defaults,
    Family,
    Parts,
    PublishedModel,
    Sample,
    Shapes,
    Sizes,
    encode_standardized,
)
from autotune.runtime import lazy_module
from autotune.schema import Bucket, TextPadding

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")

LATENT_PX = 16
"""Pixels per latent, along each side; each latent is a token."""
SLOT = 2
"""Latents along each side of what the transformer counts as one slot of an image, so sides are
multiples of it.
"""
PARTS = Parts((8_767_123_696,), "AutoencoderKLQwenImage21")
SOURCE = (
    "transformer/ of Qwen/Qwen-Image-2.1@790c92633540aa0cb11d9abf19eb46d861714758: "
    "14,230,249,472 "
    "bytes of bf16"
)
NOTE = (
    "its guidance is distilled, and there is no other base; Fizgig's authors saw adapters of it "
    "collapse that were "
    "trained long without their training adapter, so look at previews often"
)
BASE = PublishedModel(
    "Qwen/Qwen-Image-2.1", {}, PARTS, "", 7_115_124_736, "qwen-research", SOURCE, NOTE
)
BLOCK = r"transformer_blocks\.\d+"
ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0)"
MLP = r"img_mlp\.(gate_layer|proj|out)"


class QwenImage21(Family):
    """Text to image. Prompts are encoded at their own length, and pass through the model at it."""

    name = "qwen-image-2.1"
    models = (
        BASE,
        BASE.variant(
            "Qwen/Qwen-Image-2.1-Turbo",
            "qwen-image-2.1-turbo",
            note=(
                "distilled to 8 steps, which training undoes: train on qwen-image-2.1, and use "
                "the "
                "adapter here"
            ),
        ),
    )
    pipeline_class = "QwenImage21Pipeline"
    transformer_class = "QwenImage21Transformer2DModel"
    components = ("transformer", "vae", "text_encoder", "processor", "scheduler")
    tiny_config: ClassVar[Config] = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "context_in_dim": 64,
    }
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=256,
        timestep_shift=3.0,
        preview_steps=40,
        sampling_guidance=1.0,
        preview_calls=1,
        shift_by_tokens=((256, 0.5), (8192, 0.9)),
        sources={
            "rank": "musubi-tuner's guide",
            "learning_rate": "musubi-tuner's guide",
            "timestep_shift": "musubi-tuner's guide",
            "preview_steps": "the pipeline's default",
            "sampling_guidance": "the pipeline's default",
        },
    )
    size_multiple_px = LATENT_PX * SLOT
    patch = 1
    separates_prompts = True
    max_micro_batch_size = (
        1  # captions of other lengths cannot share a pass, and sharded processes count passes
    )
    max_text_tokens = (
        2048  # nothing is cut, and the rotary tables know 8,192; nobody trains on more
    )
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.{ATTENTION}",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP})",  # the modulation is outside of the blocks
    }
    block_lists = ("transformer_blocks",)
    excluded = MappingProxyType(
        {
            "modulation": "its blocks share one modulation layer, which holds 1% of the weights",
            "norm_rope": (
                "text and image attend one after the other, which the function does not support"
            ),
        }
    )

    def tokens_per_frame(self, bucket: Bucket) -> int:
        return super().tokens_per_frame(bucket) * SLOT**2

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        return super().load_pipeline(folder, **{"processor": _load_processor(folder), **components})

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        size = (bucket.height_px // LATENT_PX, bucket.width_px // LATENT_PX)
        return {
            "latents": (config.get("in_channels", 64), 1, *size),
            "prompt_embeds": (text_tokens, config.get("context_in_dim", 4096)),
        }

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence["Tensor"] = ()
    ) -> Sample:
        return {"prompt_embeds": pipeline.encode_prompt(caption)[0][0]}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        from diffusers import QwenImage21Pipeline

        processor = _load_processor(folder)
        stock = QwenImage21Pipeline(None, None, None, processor, None)
        texts = [stock.prompt_template_t2i.format(caption or " ") for caption in captions]
        return [len(ids) - stock._drop_idx for ids in processor.tokenizer(texts)["input_ids"]]

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        return encode_standardized(
            pipeline.vae, torch.cat([pixels, torch.ones_like(pixels[:1])])
        )  # opaque

    def predict(
        self, transformer: "nn.Module", noisy: "Tensor", levels: "Tensor", batch: Batch
    ) -> "Tensor":
        prompts = [batch[f"prompt_embeds_{number}"] for number in range(len(noisy))]
        if len({len(prompt) for prompt in prompts}) > 1:
            # Padding would count as text, and move the image away from it: diffusers' own test of
            # batches allows 2e-3.
            alone = [
                self.predict(
                    transformer, noisy[i : i + 1], levels[i : i + 1], {"prompt_embeds_0": prompt}
                )
                for i, prompt in enumerate(prompts)
            ]
            return torch.cat(alone)
        text, (rows, columns) = len(prompts[0]), noisy.shape[3:]
        # A trace has no numbers, but the model reads these: they stay on the host, where it does.
        places = torch.arange(
            text + rows * columns // SLOT**2, device="cpu" if noisy.is_meta else noisy.device
        )
        velocity: Tensor = transformer(
            hidden_states=noisy.flatten(2).mT,
            encoder_hidden_states=torch.stack(prompts),
            timestep=levels,
            img_shapes=[[(1, rows, columns)]] * len(noisy),
            img_mask=(places >= text).expand(len(noisy), -1),
            return_dict=False,
        )[0]
        return velocity[:, text:].mT.reshape(noisy.shape)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        return {"prompt": prompt}

    def has_attention_mask(self, micro_batch_size: int, text_padding: TextPadding) -> bool:
        return True  # of the text, which attends to what comes before


def _load_processor(folder: Path) -> Any:
    from autotune.families.qwen_processor import Qwen3VLProcessor

    return Qwen3VLProcessor.from_pretrained(folder / "processor", trust_remote_code=False)
