"""Qwen-Image: a 60-block double-stream transformer, a Qwen2.5-VL text encoder, a 16-channel
causal video VAE.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.attention import ADDED_TEXT, AttentionLayout
from autotune.families.base import (
    ATTENTION,
    CONTROL,
    PATCH,
    VAE_FACTOR,
    Batch,
    Config,
    Defaults,
    Family,
    ModulationLayers,
    Parts,
    PublishedModel,
    Sample,
    Shapes,
    Sizes,
    build_empty_pipeline,
    count_tokens,
    encode_standardized,
    pack,
    unpack,
    with_controls,
)
from autotune.runtime import lazy_module
from autotune.schema import Bucket

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")

BLOCK = r"transformer_blocks\.\d+"
QWEN_PARTS = Parts(text_encoder_parameters=(8_292_166_656,), vae_class="AutoencoderKLQwenImage")
QWEN_SOURCE = "the configuration on the hub; the class's own defaults are that model"
ORIGINAL = PublishedModel(
    "Qwen/Qwen-Image", {}, QWEN_PARTS, "", 20_430_401_088, "apache-2.0", QWEN_SOURCE
)
MLP = r"(img|txt)_mlp\.net\.(0\.proj|2)"


class QwenImage(Family):
    """Text to image. Latents are packed in 2x2 patches; prompts are encoded at their own length."""

    name = "qwen-image"
    models: ClassVar[tuple[PublishedModel, ...]] = (
        ORIGINAL,
        ORIGINAL.variant("Qwen/Qwen-Image-2512", "qwen-image-2512"),
    )
    pipeline_class = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    components: ClassVar[tuple[str, ...]] = (
        "transformer",
        "vae",
        "text_encoder",
        "tokenizer",
        "scheduler",
    )
    obsolete_config = frozenset(
        {"pooled_projection_dim"}
    )  # unused, and gone before a release had it
    tiny_config: ClassVar[Config] = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
    }
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=256,
        timestep_shift=2.2,
        preview_steps=20,
        sampling_guidance=4.0,
        shift_by_tokens=((256, 0.5), (8192, 0.9)),
        sources={
            "rank": "musubi-tuner's guide",
            "learning_rate": "diffusers' script; musubi-tuner: 5e-5",
            "timestep_shift": "musubi-tuner's guide",
        },
    )
    size_multiple_px = VAE_FACTOR * PATCH
    max_text_tokens = 1024
    masks_padding = True
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        # diffusers' own script adapts the image stream's attention alone.
        "attention": ("to_q", "to_k", "to_v", "to_out.0"),
        # musubi-tuner's choice: both streams, everything but the modulation.
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|(img|txt)_mod\.1)",
    }
    block_lists = ("transformer_blocks",)
    fp16_overflow = "in fp16 its activations overflow: Comfy-Org/ComfyUI#10751"
    modulation = ModulationLayers(rf"{BLOCK}\.(img|txt)_mod|norm_out", ("time_text_embed",))
    attention_layouts = (
        AttentionLayout(
            "QwenDoubleStreamAttnProcessor2_0", "streams", "image_rotary_emb", text=ADDED_TEXT
        ),
    )

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        channels = config.get("in_channels", 64) // PATCH**2
        latents = (channels, 1, bucket.height_px // VAE_FACTOR, bucket.width_px // VAE_FACTOR)
        controls = {
            f"{CONTROL}{number}": latents
            for number in range(1, min(num_controls, self.max_controls) + 1)
        }
        prompt = (text_tokens, config.get("joint_attention_dim", 3584))
        return {"latents": latents, **controls, "prompt_embeds": prompt}

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence["Tensor"] = ()
    ) -> Sample:
        return {"prompt_embeds": pipeline.encode_prompt(prompt=[caption])[0][0]}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        stock = build_empty_pipeline(self.pipeline_class)
        lengths = count_tokens(
            folder, [stock.prompt_template_encode.format(caption) for caption in captions]
        )
        return [
            min(n - stock.prompt_template_encode_start_idx, stock.tokenizer_max_length)
            for n in lengths
        ]

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        return encode_standardized(pipeline.vae, pixels)

    def predict(
        self, transformer: "nn.Module", noisy: "Tensor", levels: "Tensor", batch: Batch
    ) -> "Tensor":
        images = with_controls(noisy, batch)
        tokens = [pack(image) for image in images]
        velocity: Tensor = transformer(
            hidden_states=torch.cat(tokens, dim=1),
            encoder_hidden_states=batch["prompt_embeds"],
            encoder_hidden_states_mask=batch.get("prompt_mask"),
            timestep=levels.to(noisy.dtype),
            img_shapes=[[(1, image.shape[3] // PATCH, image.shape[4] // PATCH) for image in images]]
            * len(noisy),
            return_dict=False,
        )[0]
        return unpack(velocity[:, : tokens[0].shape[1]], noisy.shape)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        # Without a negative prompt the pipeline leaves guidance out; the model's card uses a blank
        # one.
        return {
            "prompt": prompt,
            "true_cfg_scale": self.defaults.sampling_guidance,
            "negative_prompt": " ",
        }
