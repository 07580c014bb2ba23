"""Qwen-Image-Edit, with one control image, and Edit-Plus (2509 and later), with several.

The transformer is Qwen-Image's: the tokens of the control images follow those of the image. The text encoder sees the
control images, too, so a caption's encoding belongs to one pair of caption and images.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.errors import InvalidInput
from autotune.families.base import Sample
from autotune.families.qwen_image import QwenImage
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

CONDITION_AREA = 1024 * 1024
"""Pixels that `QwenImageEditPipeline` resizes the image for its text encoder to; its number is a literal."""


class QwenImageEdit(QwenImage):
    """One control image. The text encoder sees it with a megapixel, so captions take some 1,400 tokens."""

    name = "qwen-image-edit"
    hub_id = "Qwen/Qwen-Image-Edit"
    pipeline_class = "QwenImageEditPipeline"
    components = (*QwenImage.components, "processor")
    max_controls = 1
    # Rate and shift as for Qwen-Image: musubi-tuner's guide names one set for both.
    defaults = replace(QwenImage.defaults, text_tokens=1536)
    picture_prompt: ClassVar[str] = ""
    """What the pipeline writes before the caption for each control image, apart from its template."""

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        return super().load_pipeline(folder, **{"processor": _processor(folder), **components})

    def encode_captions(
        self, pipeline: Any, captions: Sequence[str], controls: Sequence[Sequence["Tensor"]] = ()
    ) -> list[Sample]:
        self._check_controls(captions, controls)
        samples = []
        for caption, pixels in zip(captions, controls, strict=True):
            images = [self._condition_image(pipeline, _to_image(control)) for control in pixels]
            samples.append({"prompt_embeds": pipeline.encode_prompt(prompt=[caption], image=images)[0][0]})
        return samples

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sequence[tuple[int, int]]] = ()
    ) -> list[int]:
        import diffusers

        self._check_controls(captions, controls)
        processor = _processor(folder)
        parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
        pipeline = getattr(diffusers, self.pipeline_class)(processor=processor, **parts)
        counts = []
        for caption, sizes in zip(captions, controls, strict=True):
            pictures = "".join(self.picture_prompt.format(number) for number in range(1, len(sizes) + 1))
            text = pipeline.prompt_template_encode.format(pictures + caption)
            num_image_tokens = sum(processor.num_image_tokens(*self._condition_size(*size)) for size in sizes)
            # Each image's placeholder is one token of the text already.
            num_tokens = len(processor.tokenizer(text)["input_ids"]) + num_image_tokens - len(sizes)
            counts.append(num_tokens - pipeline.prompt_template_encode_start_idx)
        return counts

    def sampling_arguments(
        self, pipeline: Any, bucket: Bucket, guidance: float | None, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        image = controls[0] if self.max_controls == 1 else list(controls)
        return {**super().sampling_arguments(pipeline, bucket, guidance, controls), "image": image}

    def _condition_size(self, width: int, height: int) -> tuple[int, int]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as stock

        size = stock.calculate_dimensions(CONDITION_AREA, width / height)
        return int(size[0]), int(size[1])

    def _condition_image(self, pipeline: Any, image: "Image.Image") -> Any:
        width, height = self._condition_size(*image.size)
        return pipeline.image_processor.resize(image, height, width)

    def _check_controls(self, captions: Sequence[str], controls: Sequence[Sequence[object]]) -> None:
        good = len(controls) == len(captions) and all(1 <= len(images) <= self.max_controls for images in controls)
        if not good:
            most = "one control image" if self.max_controls == 1 else f"one to {self.max_controls} control images"
            raise InvalidInput(
                f"{self.name} needs {most} for every item",
                hint="put the control images into a folder of their own, with the names of the images they belong to",
            )


class QwenImageEditPlus(QwenImageEdit):
    """One to three control images; the text encoder sees each with 384 x 384 pixels."""

    name = "qwen-image-edit-plus"
    hub_id = "Qwen/Qwen-Image-Edit-2509"
    pipeline_class = "QwenImageEditPlusPipeline"
    max_controls = 3  # the model's card: best with one to three
    defaults = replace(QwenImage.defaults, text_tokens=384)
    picture_prompt = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"

    def _condition_size(self, width: int, height: int) -> tuple[int, int]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        size = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
        return int(size[0]), int(size[1])


def _processor(folder: Path) -> Any:
    from autotune.families.qwen_processor import Qwen2VLProcessor

    return Qwen2VLProcessor.from_pretrained(folder / "processor")


def _to_image(pixels: "Tensor") -> "Image.Image":
    """A PIL image of pixels (3, 1, height, width) in [-1, 1]."""
    from PIL import Image

    values = ((pixels[:, 0].float().cpu() + 1) * 127.5).round().clamp(0, 255).byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())
