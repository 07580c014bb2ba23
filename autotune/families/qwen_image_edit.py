"""Qwen-Image-Edit, with one control image, and Edit-Plus (2509 and later), with several.

The transformer is Qwen-Image's: the tokens of the control images follow those of the image. The
text encoder sees the control images, too, so a caption's encoding belongs to one pair of caption
and images.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from autotune.families.base import PublishedModel, Sample, Sizes, build_empty_pipeline
from autotune.families.qwen_image import QWEN_PARTS, QWEN_SOURCE, QwenImage
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


class QwenImageEdit(QwenImage):
    """One control image. The text encoder sees it at one megapixel, so captions take some 1,400
    tokens.
    """

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
    template.
    """

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        return super().load_pipeline(folder, **{"processor": _load_processor(folder), **components})

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence["Tensor"] = ()
    ) -> Sample:
        self.check_num_controls(len(controls), f"the caption {caption!r}")
        to_images = pipeline.image_processor.postprocess
        images = [to_images(pixels.movedim(1, 0).float())[0] for pixels in controls]
        return {"prompt_embeds": self._encode(pipeline, caption, images)[0]}

    def _encode(self, pipeline: Any, caption: str, images: Sequence["Image.Image"]) -> "Tensor":
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
    ) -> list["Image.Image"]:
        with self._control_area(bucket.width_px * bucket.height_px):
            return super().sample(pipeline, prompt, bucket, **options)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence["Image.Image"]
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
        pipelines' own function.
        """
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
    from autotune.families.qwen_processor import Qwen2VLProcessor

    return Qwen2VLProcessor.from_pretrained(folder / "processor", trust_remote_code=False)
