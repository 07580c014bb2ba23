"""Small text encoders and tokenizers of the real classes, for the small pipelines of demos and
tests."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3VLConfig,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from autotune.models.latents import image_processor

QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif "
    "%}{% endif %}"
)
"""Qwen3's chat template, as far as one message needs it."""

QWEN_VL_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
"""Qwen3-VL's chat template, as far as a message of text alone needs it."""

MISTRAL_CHAT = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ message.role }}]{% endfor %}"
)
"""A chat template that takes each message in parts, as Mistral's does."""

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


def _train_bpe(texts: Sequence[str], **options: Any) -> dict[str, Any]:
    """Vocabulary and merges of a byte-level BPE, as tokenizers take them."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, min_frequency=1, show_progress=False, **options)
    model = json.loads(bpe.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def qwen_tokenizer(captions: Sequence[str], template: str, chat: str = QWEN_CHAT) -> Any:
    """A `Qwen2Tokenizer` trained on `captions`, with Qwen2.5-VL's special tokens and the chat
    template `chat`.

    Its byte-level BPE is trained on the pipeline's `template`, too, which then has as many tokens
    as with the original tokenizer: the pipeline drops a fixed number of them.
    """
    tokenizer = Qwen2Tokenizer(**_train_bpe([*captions, template], vocab_size=1024))
    tokenizer.add_special_tokens({"extra_special_tokens": list(QWEN_SPECIAL_TOKENS)})
    tokenizer.chat_template = chat
    return tokenizer


def _decoder(tokenizer: Any, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """What the language models' configurations have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "head_dim": 32,
    }


def qwen3(cls: Any, tokenizer: Any, hidden_size: int, num_layers: int) -> Any:
    """A small Qwen3 of class `cls`: `Qwen3Model` or `Qwen3ForCausalLM`."""
    config = Qwen3Config(
        **_decoder(tokenizer, hidden_size, num_layers),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cls(config).eval()


def qwen3_vl(cls: Any, tokenizer: Any, hidden_size: int, num_layers: int) -> Any:
    """A small Qwen3-VL of class `cls`, `Qwen3VLModel` or `Qwen3VLForConditionalGeneration`, with
    a one-layer vision tower."""
    text = {
        **_decoder(tokenizer, hidden_size, num_layers),
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image_token", "image_pad"),
            ("video_token", "video_pad"),
            ("vision_start_token", "vision_start"),
            ("vision_end_token", "vision_end"),
        )
    }
    return cls(Qwen3VLConfig(text_config=text, vision_config=vision, **ids)).eval()


def mistral3(tokenizer: Any, hidden_size: int, num_layers: int) -> Any:
    """A small `Mistral3ForConditionalGeneration` with a one-layer vision tower."""
    text = {
        "model_type": "mistral",
        **_decoder(tokenizer, hidden_size, num_layers),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    vision = {
        **{
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
        },
        **{"num_attention_heads": 1, "head_dim": 32, "image_size": 28},
    }
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision)
    ).eval()


def gemma_tokenizer(captions: Sequence[str], max_length: int) -> Any:
    """A `GemmaTokenizer` with byte-level BPE trained on `captions`."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    return GemmaTokenizer(
        **_train_bpe(captions, vocab_size=512, special_tokens=special), model_max_length=max_length
    )


def gemma3(tokenizer: Any, hidden_size: int, num_layers: int) -> Any:
    """A small `Gemma3ForConditionalGeneration` with a one-layer vision tower."""
    text = {**_decoder(tokenizer, hidden_size, num_layers), "query_pre_attn_scalar": 32}
    vision = {
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        },
        **{"image_size": 28, "patch_size": 14, "vision_use_head": False},
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


def qwen_text_encoder(tokenizer: Any, hidden_size: int, num_layers: int = 2) -> Any:
    """A small `Qwen2_5_VLForConditionalGeneration` with a one-layer vision tower."""
    heads = hidden_size // 32
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size * 2,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [4, 6, 6],
            },
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


def qwen_processor(tokenizer: Any) -> Any:
    """Processor of Qwen2.5-VL that shrinks images to at most 16 tokens."""
    return image_processor("Qwen2VLProcessor")(
        image_processor=qwen_image_processor(), tokenizer=tokenizer
    )


def qwen_image_processor() -> Any:
    """Image processor of Qwen2.5-VL, with patches of 14 pixels; shrinks images to at most 16
    tokens."""
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28**2, "longest_edge": (4 * 28) ** 2})


def clip_tokenizer(captions: Sequence[str]) -> Any:
    """A `CLIPTokenizer` with the words and characters of `captions` as its vocabulary."""
    words = sorted({word for caption in captions for word in caption.lower().split()})
    characters = sorted({character for word in words for character in word})
    pieces = [*characters, *(f"{character}</w>" for character in characters)]
    vocabulary = {
        token: index for index, token in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])
    }
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def clip_text_encoder(tokenizer: Any, hidden_size: int) -> Any:
    """A two-layer `CLIPTextModel`; its pooled output has `hidden_size` numbers."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // 32,
        projection_dim=hidden_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def t5_tokenizer(captions: Sequence[str], max_length: int) -> Any:
    """A unigram `T5Tokenizer` with the words and characters of `captions` as its vocabulary."""
    words = sorted({word for caption in captions for word in caption.split()})
    characters = sorted({character for word in words for character in word})
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    scored += [(f"▁{word}", -1.0) for word in words if len(word) > 1]
    scored += [(character, -8.0) for character in characters]
    return T5Tokenizer(vocab=scored, extra_ids=0, model_max_length=max_length)


def t5_encoder(tokenizer: Any, hidden_size: int, *, is_umt5: bool = False) -> Any:
    """A two-layer `T5EncoderModel`, or `UMT5EncoderModel`."""
    config = (UMT5Config if is_umt5 else T5Config)(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        d_kv=32,
        d_ff=hidden_size * 2,
        num_layers=2,
        num_heads=hidden_size // 32,
        feed_forward_proj="gated-gelu",
    )
    return (UMT5EncoderModel if is_umt5 else T5EncoderModel)(config).eval()


def flux_vae() -> Any:
    """FLUX's `AutoencoderKL` (also used by Kandinsky5 for images): 16 channels, factor 8, no
    quant convolutions."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=16,
        # gives random weights latents of about unit variance, as 0.3611 does the published ones
        scaling_factor=3.0,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


@torch.no_grad()
def invert_input_layer(output: Any, input_weight: Any) -> None:
    """Let a transformer's last layer undo its first, so that it begins by predicting its input.

    Between purely random projections an adapter of low rank could learn almost nothing in a demo's
    few steps.
    """
    output.weight.copy_(torch.linalg.pinv(input_weight))
    if output.bias is not None:
        output.bias.zero_()
