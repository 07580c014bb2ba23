"""Qwen-Image, its editing models, and Qwen-Image 2.1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from PIL import Image

from autotune.models.family import (
    ADDED_TEXT,
    AttentionLayout,
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
)
from autotune.models.latents import (
    ATTENTION,
    CONTROL,
    PATCH,
    VAE_FACTOR,
    build_empty_pipeline,
    count_tokens,
    encode_standardized,
    pack,
    unpack,
    with_controls,
)
from autotune.plan.workload import Bucket, TextPadding
from autotune.system.process import lazy_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")

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
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
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

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        return encode_standardized(pipeline.vae, pixels)

    def predict(
        self, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
    ) -> Tensor:
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
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence[Image.Image]
    ) -> dict[str, Any]:
        # Without a negative prompt the pipeline leaves guidance out; the model's card uses a blank
        # one.
        return {
            "prompt": prompt,
            "true_cfg_scale": self.defaults.sampling_guidance,
            "negative_prompt": " ",
        }


class QwenImageEdit(QwenImage):
    """One control image. The text encoder sees it at one megapixel, so captions take some 1,400
    tokens."""

    name = "qwen-image-edit"
    models: ClassVar[tuple[PublishedModel, ...]] = (
        PublishedModel(
            "Qwen/Qwen-Image-Edit",
            {},
            QWEN_PARTS,
            num_parameters=20_430_401_088,
            license="apache-2.0",
            source=QWEN_SOURCE,
        ),
    )
    pipeline_class = "QwenImageEditPipeline"
    components = (*QwenImage.components, "processor")
    max_controls = 1
    max_text_tokens = 3840  # nothing is cut; of 4096 positions a picture's side takes up to 256
    # Rate and shift as for Qwen-Image: musubi-tuner's guide names one set for both.
    defaults = replace(QwenImage.defaults, text_tokens=1536)
    condition_area_px: ClassVar[int] = 1024 * 1024
    """Pixels to which the pipeline resizes images for the text encoder."""
    picture_prompt: ClassVar[str] = ""
    """Text that the pipeline puts before the caption for each control image, apart from its
    template."""

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        return super().load_pipeline(folder, **{"processor": _load_processor(folder), **components})

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        self.check_num_controls(len(controls), f"the caption {caption!r}")
        to_images = pipeline.image_processor.postprocess
        images = [to_images(pixels.movedim(1, 0).float())[0] for pixels in controls]
        return {"prompt_embeds": self._encode(pipeline, caption, images)[0]}

    def _encode(self, pipeline: Any, caption: str, images: Sequence[Image.Image]) -> Tensor:
        resized = []
        for image in images:
            width, height = self._condition_size(*image.size)
            resized.append(pipeline.image_processor.resize(image, height, width))
        prompt: Tensor = pipeline.encode_prompt(prompt=[caption], image=resized)[0]
        return prompt

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        processor = _load_processor(folder)
        pipeline = build_empty_pipeline(self.pipeline_class)
        counts = []
        for caption, sizes in zip(captions, controls, strict=True):
            self.check_num_controls(len(sizes), f"the caption {caption!r}")
            pictures = "".join(
                self.picture_prompt.format(number) for number in range(1, len(sizes) + 1)
            )
            text = pipeline.prompt_template_encode.format(pictures + caption)
            num_image_tokens = sum(
                processor.num_image_tokens(*self._condition_size(*size)) for size in sizes
            )
            # Each image's placeholder is one token of the text already.
            num_tokens = len(processor.tokenizer(text)["input_ids"]) + num_image_tokens - len(sizes)
            counts.append(num_tokens - pipeline.prompt_template_encode_start_idx)
        return counts

    def sample(
        self, pipeline: Any, prompt: str, bucket: Bucket, **options: Any
    ) -> list[Image.Image]:
        with self._control_area(bucket.width_px * bucket.height_px):
            return super().sample(pipeline, prompt, bucket, **options)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence[Image.Image]
    ) -> dict[str, Any]:
        self.check_num_controls(len(controls), "the prompt")
        usual = super().sampling_arguments(pipeline, prompt, bucket, controls)
        return {
            "true_cfg_scale": usual["true_cfg_scale"],
            "prompt_embeds": self._encode(pipeline, prompt, controls),
            "negative_prompt_embeds": self._encode(pipeline, usual["negative_prompt"], controls),
            "image": controls[0] if self.max_controls == 1 else list(controls),
        }

    def _control_area(self, area_px: int) -> AbstractContextManager[object]:
        """Make the pipeline encode control images with this many pixels, as training does, instead
        of a megapixel.

        A preview then needs the memory that was planned, and sees what the adapter was trained on.
        The pipeline has no argument for it, so a name in its module is replaced while one preview
        runs.
        """
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as stock

        stock_size = stock.calculate_dimensions
        return mock.patch.object(
            stock, "calculate_dimensions", lambda _, ratio: stock_size(area_px, ratio)
        )

    def _condition_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in px that the text encoder sees, in multiples of 32, as the
        pipelines' own function."""
        ratio = width / height
        new_width = math.sqrt(self.condition_area_px * ratio)
        return round(new_width / 32) * 32, round(new_width / ratio / 32) * 32


class QwenImageEditPlus(QwenImageEdit):
    """One to three control images; the text encoder sees each with 384 x 384 pixels."""

    name = "qwen-image-edit-plus"
    models = (
        PublishedModel(
            "Qwen/Qwen-Image-Edit-2509",
            {},
            QWEN_PARTS,
            num_parameters=20_430_401_088,
            license="apache-2.0",
            source=QWEN_SOURCE,
        ),
        PublishedModel(
            "Qwen/Qwen-Image-Edit-2511",
            {"zero_cond_t": True},  # control images count as clean, whatever the noise
            QWEN_PARTS,
            name="qwen-image-edit-2511",
            num_parameters=20_430_401_088,
            license="apache-2.0",
        ),
    )
    pipeline_class = "QwenImageEditPlusPipeline"
    max_controls = 3  # the model's card: best with one to three
    defaults = replace(QwenImage.defaults, text_tokens=384)
    condition_area_px = 384 * 384
    picture_prompt = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"

    def _control_area(self, area_px: int) -> AbstractContextManager[object]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        return mock.patch.object(stock, "VAE_IMAGE_SIZE", area_px)


def _load_processor(folder: Path) -> Any:
    from autotune.models.qwen_processor import Qwen2VLProcessor

    return Qwen2VLProcessor.from_pretrained(folder / "processor", trust_remote_code=False)


LATENT_PX = 16
"""Pixels per latent, along each side; each latent is a token."""
SLOT = 2
"""Latents along each side of what the transformer counts as one slot of an image, so sides are
multiples of it."""
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
QWEN_21_BLOCK = r"transformer_blocks\.\d+"
ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0)"
QWEN_21_MLP = r"img_mlp\.(gate_layer|proj|out)"


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
        "attention": rf"{QWEN_21_BLOCK}\.{ATTENTION}",
        "attention+mlp": rf"{QWEN_21_BLOCK}\.({ATTENTION}|{QWEN_21_MLP})",
        "all-linear": rf"{QWEN_21_BLOCK}\.({ATTENTION}|{QWEN_21_MLP})",  # the modulation is outside of the blocks
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
        return super().load_pipeline(
            folder, **{"processor": _qwen_21_load_processor(folder), **components}
        )

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        size = (bucket.height_px // LATENT_PX, bucket.width_px // LATENT_PX)
        return {
            "latents": (config.get("in_channels", 64), 1, *size),
            "prompt_embeds": (text_tokens, config.get("context_in_dim", 4096)),
        }

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        return {"prompt_embeds": pipeline.encode_prompt(caption)[0][0]}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        from diffusers import QwenImage21Pipeline

        processor = _qwen_21_load_processor(folder)
        stock = QwenImage21Pipeline(None, None, None, processor, None)
        texts = [stock.prompt_template_t2i.format(caption or " ") for caption in captions]
        return [len(ids) - stock._drop_idx for ids in processor.tokenizer(texts)["input_ids"]]

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        return encode_standardized(
            pipeline.vae, torch.cat([pixels, torch.ones_like(pixels[:1])])
        )  # opaque

    def predict(
        self, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
    ) -> Tensor:
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
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence[Image.Image]
    ) -> dict[str, Any]:
        return {"prompt": prompt}

    def has_attention_mask(self, micro_batch_size: int, text_padding: TextPadding) -> bool:
        return True  # of the text, which attends to what comes before


def _qwen_21_load_processor(folder: Path) -> Any:
    from autotune.models.qwen_processor import Qwen3VLProcessor

    return Qwen3VLProcessor.from_pretrained(folder / "processor", trust_remote_code=False)
