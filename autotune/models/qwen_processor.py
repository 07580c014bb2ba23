"""Processors of Qwen's vision models without torchvision: the stock ones build a video processor
that needs it, and no family shows its encoder a video. Imports transformers: import it inside
functions."""

from typing import Any

from transformers import Qwen2VLProcessor as StockQwen2VL
from transformers import Qwen3VLProcessor as StockQwen3VL
from transformers.processing_utils import ProcessorMixin

IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"


class _WithoutVideo(ProcessorMixin):  # type: ignore[misc]
    """Tokenizer and PIL image processor."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        self.image_token = IMAGE_TOKEN
        self.video_token = VIDEO_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self.video_token_id = tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def num_image_tokens(self, width_px: int, height_px: int) -> int:
        """Tokens that an image of this size becomes."""
        num_patches = self.image_processor.get_number_of_image_patches(height_px, width_px)
        return int(num_patches) // int(self.image_processor.merge_size) ** 2


class Qwen2VLProcessor(_WithoutVideo, StockQwen2VL):  # type: ignore[misc]
    """Processor of Qwen2-VL and Qwen2.5-VL."""


class Qwen3VLProcessor(_WithoutVideo, StockQwen3VL):  # type: ignore[misc]
    """Processor of Qwen3-VL."""


# diffusers writes a component's module into model_index.json: a saved pipeline must name the stock
# class.
Qwen2VLProcessor.__module__ = StockQwen2VL.__module__
Qwen3VLProcessor.__module__ = StockQwen3VL.__module__
