"""Small text encoders and tokenizers of the real classes, for the small pipelines of demos and tests."""

import json
from collections.abc import Sequence
from typing import Any

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


QWEN_TEMPLATE = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships"
    " of the objects and background:\nuser\nassistant\n"
)
"""Words of the pipeline's prompt template: trained in, so they take about as many tokens as in the original."""


def qwen_tokenizer(captions: Sequence[str]) -> Any:
    """A `Qwen2Tokenizer` whose byte-level BPE is trained on `captions`, with Qwen2.5-VL's special tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Qwen2Tokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([*captions, QWEN_TEMPLATE], vocab_size=512, min_frequency=1, show_progress=False)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    tokenizer.add_special_tokens({"extra_special_tokens": list(QWEN_SPECIAL_TOKENS)})
    return tokenizer


def qwen_text_encoder(tokenizer: Any, hidden_size: int) -> Any:
    """A two-layer `Qwen2_5_VLForConditionalGeneration` with a one-layer vision tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    heads = hidden_size // 32
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size * 2,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": hidden_size,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()
