"""Qwen-Image, its editing models, and Qwen-Image 2.1."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from autotune.models import facts, latents
from autotune.models.family import (
    PLACES,
    Batch,
    Family,
    Images,
    Options,
    Pixels,
    Sample,
    Shapes,
    Sizes,
    Texts,
)
from autotune.plan.workload import Bucket, TextPadding
from autotune.system.lazy import Tensor, torch

BLOCK = r"transformer_blocks\.\d+"
MLP = r"(img|txt)_mlp\.net\.(0\.proj|2)"
MODULE = "diffusers.models.transformers.transformer_qwenimage"


class QwenImage(Family):
    """Text to image. Latents are packed in 2x2 patches; prompts are encoded at their own length."""

    name = "qwen-image"
    models, defaults, tiny_config = facts.family_facts(name)
    pipeline_class = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    # Unused, and gone before a release had it.
    obsolete_config = frozenset({"pooled_projection_dim"})
    latent_channels = ("in_channels", 64)
    counts_packed = True
    prompt_size = (("joint_attention_dim", 3584),)
    max_text_tokens = 1024
    masks_padding = True
    target_sets = {
        # musubi-tuner's choice: both streams, everything but the modulation.
        **latents.adapted_layers(BLOCK, latents.ATTENTION, MLP, r"(img|txt)_mod\.1"),
        # diffusers' own script adapts the image stream's attention alone.
        "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    }
    fp16_overflow = "in fp16 its activations overflow: Comfy-Org/ComfyUI#10751"
    modulation = facts.ModulationLayers(rf"{BLOCK}\.(img|txt)_mod|norm_out", ("time_text_embed",))
    attention_layouts = (
        facts.AttentionLayout(
            "QwenDoubleStreamAttnProcessor2_0", "streams", "image_rotary_emb", text=facts.ADDED_TEXT
        ),
    )

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        stock = latents.build_empty_pipeline(self.pipeline_class)
        texts = [stock.prompt_template_encode.format(caption) for caption in captions]
        start, longest = stock.prompt_template_encode_start_idx, stock.tokenizer_max_length
        return [min(length - start, longest) for length in latents.count_tokens(folder, texts)]

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        images = latents.with_controls(noisy, batch)
        tokens = [latents.pack(image) for image in images]
        shapes = [
            (1, image.shape[3] // latents.PATCH, image.shape[4] // latents.PATCH)
            for image in images
        ]
        inputs = {
            "hidden_states": torch.cat(tokens, dim=1),
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_hidden_states_mask": batch.get("prompt_mask"),
            "timestep": levels.to(noisy.dtype),
            "img_shapes": [shapes] * len(noisy),
        }
        # What it counts is unused, and makes the host wait for the device.
        counted = f"{MODULE}.compute_text_seq_len_from_mask"
        with mock.patch(counted, lambda prompts, mask: (prompts.shape[1], None, mask)):
            velocity: Tensor = transformer(**inputs, return_dict=False)[0]
        return latents.unpack(velocity[:, : tokens[0].shape[1]], noisy.shape)

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        # Without a negative prompt the pipeline leaves guidance out; the card uses a blank one.
        guidance = self.defaults.sampling_guidance
        return {"prompt": prompt, "true_cfg_scale": guidance, "negative_prompt": " "}


class QwenImageEdit(latents.QwenProcessor, QwenImage):
    """One control image, some 1,400 tokens of the caption: the encoder sees one megapixel."""

    name = "qwen-image-edit"
    models, defaults, tiny_config = facts.family_facts(name)
    pipeline_class = "QwenImageEditPipeline"
    components = (*QwenImage.components, "processor")
    processor = ("processor", "Qwen2VLProcessor")
    min_controls = max_controls = 1
    max_text_tokens = 3840  # nothing is cut; of 4096 positions a picture's side takes up to 256
    condition_area_px: ClassVar[int] = 1024 * 1024  # of images for the text encoder
    picture_prompt: ClassVar[str] = ""  # for each of them, before the caption

    def encode_caption(self, pipeline: Any, caption: str, controls: Pixels = ()) -> Sample:
        self.check_num_controls(len(controls), f"the caption {caption!r}")
        to_images = pipeline.image_processor.postprocess
        images = [to_images(pixels.movedim(1, 0).float())[0] for pixels in controls]
        return {"prompt_embeds": self._encode(pipeline, caption, images)[0]}

    def _encode(self, pipeline: Any, caption: str, images: Images) -> Tensor:
        resized = []
        for image in images:
            width, height = self._condition_size(*image.size)
            resized.append(pipeline.image_processor.resize(image, height, width))
        prompt: Tensor = pipeline.encode_prompt(prompt=[caption], image=resized)[0]
        return prompt

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        processor = self.load_processor(folder)
        stock = latents.build_empty_pipeline(self.pipeline_class)
        counts = []
        for caption, sizes in zip(captions, controls, strict=True):
            self.check_num_controls(len(sizes), f"the caption {caption!r}")
            pictures = (self.picture_prompt.format(number + 1) for number in range(len(sizes)))
            text = stock.prompt_template_encode.format("".join(pictures) + caption)
            seen = [processor.num_image_tokens(*self._condition_size(*size)) for size in sizes]
            # Each image's placeholder is one token of the text already.
            num_tokens = len(processor.tokenizer(text)["input_ids"]) + sum(seen) - len(sizes)
            counts.append(num_tokens - stock.prompt_template_encode_start_idx)
        return counts

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        self.check_num_controls(len(controls), "the prompt")
        usual = super().call_options(pipeline, prompt, bucket, controls)
        return {
            "true_cfg_scale": usual["true_cfg_scale"],
            "prompt_embeds": self._encode(pipeline, prompt, controls),
            "negative_prompt_embeds": self._encode(pipeline, usual["negative_prompt"], controls),
            "image": controls[0] if self.max_controls == 1 else list(controls),
        }

    def while_sampling(self, pipeline: Any, bucket: Bucket) -> AbstractContextManager[object]:
        """Make the pipeline encode control images at the size of training, not at a megapixel. A
        preview then needs the memory that was planned, and sees what the adapter was trained on."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as stock

        area_px, stock_size = bucket.width_px * bucket.height_px, stock.calculate_dimensions
        return mock.patch.object(
            stock, "calculate_dimensions", lambda _, ratio: stock_size(area_px, ratio)
        )

    def _condition_size(self, width: int, height: int) -> tuple[int, int]:
        # What the text encoder sees, as the pipelines' own function.
        ratio = width / height
        new_width = math.sqrt(self.condition_area_px * ratio)
        return round(new_width / 32) * 32, round(new_width / ratio / 32) * 32


class QwenImageEditPlus(QwenImageEdit):
    """One to three control images; the text encoder sees each with 384 x 384 pixels."""

    name = "qwen-image-edit-plus"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"qwen-image-edit-2509": "qwen-image-edit-plus"}
    pipeline_class = "QwenImageEditPlusPipeline"
    max_controls = 3  # the model's card: best with one to three
    condition_area_px = 384 * 384
    picture_prompt = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"

    def while_sampling(self, pipeline: Any, bucket: Bucket) -> AbstractContextManager[object]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        return mock.patch.object(stock, "VAE_IMAGE_SIZE", bucket.width_px * bucket.height_px)


SLOT = 2  # latents along each side of what Qwen-Image 2.1 counts as one slot of an image
PICTURE = "<image{}><|vision_start|><|image_pad|><|vision_end|>"


class QwenImage21(latents.QwenProcessor, Family):
    """Text to image, and editing: control images stand among the tokens of the text, at
    `image_places`. Prompts pass through the model at their own length."""

    name = "qwen-image-2.1"
    models, defaults, tiny_config = facts.family_facts(name)
    pipeline_class = "QwenImage21Pipeline"
    transformer_class = "QwenImage21Transformer2DModel"
    components = ("transformer", "vae", "text_encoder", "processor", "scheduler")
    processor = ("processor", "Qwen3VLProcessor")
    latent_px = 16
    patch = 1
    size_multiple_px = latent_px * SLOT
    latent_channels = ("in_channels", 64)
    prompt_size = (("context_in_dim", 4096),)
    separates_prompts = True
    # Captions of other lengths cannot share a pass, and sharded processes count passes.
    max_micro_batch_size = 1
    max_controls = 3  # of the ten that its authors name
    # Nothing is cut, and the rotary tables know 8,192: three megapixels take 3,072.
    max_text_tokens = 4096
    target_sets = latents.adapted_layers(
        BLOCK, r"attn\.(to_q|to_k|to_v|to_out\.0)", r"img_mlp\.(gate_layer|proj|out)"
    )
    excluded = {
        "modulation": "its blocks share one modulation layer, which holds 1% of the weights",
        "norm_rope": (
            "text and image attend one after the other, which the function does not support"
        ),
    }

    def tokens_per_frame(self, bucket: Bucket) -> int:
        return super().tokens_per_frame(bucket) * SLOT**2

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        from diffusers import QwenImage21Pipeline

        processor = self.load_processor(folder)
        stock, counts = QwenImage21Pipeline(None, None, None, processor, None), []
        for caption, sizes in zip(captions, controls or [()] * len(captions), strict=True):
            pictures = " ".join(PICTURE.format(number + 1) for number in range(len(sizes)))
            text = stock.prompt_template_t2i.format(pictures + (caption or " "))
            seen = [processor.num_image_tokens(*size) - 1 for size in sizes]
            counts.append(len(processor.tokenizer(text)["input_ids"]) + sum(seen) - stock._drop_idx)
        return counts

    def sample_shapes(
        self, config: facts.Config, bucket: Bucket, text_tokens: int, num_controls: int = 0
    ) -> Shapes:
        shapes = super().sample_shapes(config, bucket, text_tokens, num_controls)
        return {**shapes, PLACES: (num_controls,)} if num_controls else shapes

    def encode_caption(self, pipeline: Any, caption: str, controls: Pixels = ()) -> Sample:
        to_images = pipeline.image_processor.postprocess
        images = [to_images(pixels.movedim(1, 0).float())[0] for pixels in controls] or None
        prompt, _, is_image = pipeline.encode_prompt(prompt=[caption], image=images)
        begins = is_image[0, 1:] & ~is_image[0, :-1]
        places = {PLACES: begins.nonzero()[:, 0] + 1} if images else {}
        return {"prompt_embeds": prompt[0], **places}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        opaque = torch.cat([pixels, torch.ones_like(pixels[:1])])
        return super().encode_pixels(pipeline, opaque)

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        target, *controls = latents.with_controls(noisy, batch)
        images, predicted = [*controls, target], list[Tensor]()
        shapes = [(1, *each.shape[3:]) for each in images]
        slots = [math.prod(shape) // SLOT**2 for shape in shapes]
        packed = torch.cat([each.flatten(2).mT for each in images], dim=1)
        # Padding would count as text, and move the image away from it: each has a pass.
        for number, level in enumerate(levels):
            text = batch[f"prompt_embeds_{number}"][None]
            if (missing := sum(slots[:-1]) - text.shape[1]) > 0:  # in trials of short captions
                text = torch.nn.functional.pad(text, (0, 0, 0, missing))
            is_slot = torch.arange(text.shape[1] + slots[-1]) >= text.shape[1]
            end = 0
            for at, slot in enumerate(slots[:-1]):
                place = end if noisy.is_meta else int(batch[PLACES][number, at])
                # Those of trials are random.
                start = min(max(place, end), text.shape[1] - sum(slots[at:-1]))
                end = start + slot
                is_slot[start:end] = True
            given = packed[number : number + 1], text, level[None], shapes, is_slot
            with mock.patch(f"{MODULE}21.QwenImage21Transformer2DModel.forward", _forward):
                predicted.append(transformer(*given)[:, -math.prod(shapes[-1]) :])
        return torch.cat(predicted).mT.reshape(noisy.shape)

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        if not controls:
            return {"prompt": prompt}
        side = round(math.sqrt(bucket.width_px * bucket.height_px))  # not a megapixel: as trained
        return {"prompt": prompt, "image": list(controls), "output_resolution": side}

    def has_attention_mask(self, micro_batch_size: int, text_padding: TextPadding) -> bool:
        return True  # of the text, which attends to what comes before


def _forward(
    self: Any, packed: Tensor, text: Tensor, levels: Tensor, shapes: Sequence[Any], is_slot: Tensor
) -> Tensor:
    """Predict as the class in diffusers, which waits for the device a dozen times to read where
    pictures are. `is_slot` (text and the last picture's slots,) stays on the host."""
    from diffusers.models.transformers.transformer_qwenimage21 import _qwenimage21_prefix_segments

    is_image = is_slot.repeat_interleave(torch.where(is_slot, SLOT**2, 1))
    image_ids, is_target = self.build_token_metadata(is_image, shapes)
    segments = _qwenimage21_prefix_segments(image_ids, len(is_image) - math.prod(shapes[-1]))
    device = text.device if text.is_meta else is_image.device
    rotary = latents.send(self.pos_embed(shapes, is_image, device), text.device)
    words = self.txt_in(text)
    pictures = iter(self.img_in(packed).split([math.prod(shape) for shape in shapes], dim=1))
    parts, at = list[Tensor](), 0
    for start, end, is_text in segments:
        length = end - start
        parts.append(words[:, at : at + length] if is_text else next(pictures))
        at += length if is_text else length // SLOT**2
    hidden = torch.cat([*parts, *pictures], dim=1)
    levels, target = levels.to(hidden.dtype), None
    if self.config.causal_condition:
        levels = torch.cat([levels, levels.new_zeros(1)])
        target = latents.send(is_target, text.device)
    embedded = self.time_text_embed(levels, hidden)
    shared = (self.modulation(embedded), rotary, None, target, None, None, None, segments, None)
    for block in self.transformer_blocks:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            hidden = self._gradient_checkpointing_func(block, hidden, *shared)
        else:
            hidden = block(hidden, *shared)
    velocity: Tensor = self.proj_out(self.norm_out(hidden, embedded, target))
    return velocity
