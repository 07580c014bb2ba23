"""Qwen2.5-VL's processor without torchvision: the stock one builds a video processor that needs it, and no family shows
its encoder a video. Imports transformers: import it inside functions."""

from typing import Any

from transformers import Qwen2VLProcessor as StockProcessor
from transformers.processing_utils import ProcessorMixin

IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"


class Qwen2VLProcessor(StockProcessor):  # type: ignore[misc]
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


# diffusers writes a component's module into model_index.json: a saved pipeline must name the stock class.
Qwen2VLProcessor.__module__ = StockProcessor.__module__
