"""Small text encoders, tokenizers and autoencoders of the real classes."""

import json
from pathlib import Path

import diffusers
import torch
import transformers
import yaml
from tokenizers import ByteLevelBPETokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from autotune.models.latents import image_processor

SIZES = yaml.safe_load((Path(__file__).parent / "sizes.yaml").read_text())
QWEN_CHAT = (  # Qwen3's, as far as one message needs it
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif "
    "%}{% endif %}"
)
QWEN_VL_CHAT = (  # Qwen3-VL's, as far as a message of text alone needs it
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
MISTRAL_CHAT = (  # takes each message in parts, as Mistral's does
    "{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ message.role }}]{% endfor %}"
)

QWEN_SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)


def _train_bpe(texts, **options):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, min_frequency=1, show_progress=False, **options)
    model = json.loads(bpe.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def qwen_tokenizer(captions, template, chat=QWEN_CHAT):
    """A tokenizer trained on `captions` and on the pipeline's `template`, which so has the number
    of tokens that the pipeline drops."""
    tokenizer = transformers.Qwen2Tokenizer(**_train_bpe([*captions, template], vocab_size=1024))
    tokenizer.add_special_tokens({"extra_special_tokens": list(QWEN_SPECIAL_TOKENS)})
    tokenizer.chat_template = chat
    return tokenizer


def _decoder(tokenizer, hidden_size, num_layers):
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "head_dim": 32,
    }


def qwen3(cls, tokenizer, hidden_size, num_layers):
    config = transformers.Qwen3Config(
        **_decoder(tokenizer, hidden_size, num_layers),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return cls(config).eval()


def _qwen_vision(tokenizer, hidden_size):
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    vision["out_hidden_size"] = hidden_size
    to_id = tokenizer.convert_tokens_to_ids
    return {
        "vision_config": vision,
        "image_token_id": to_id("<|image_pad|>"),
        "video_token_id": to_id("<|video_pad|>"),
        "vision_start_token_id": to_id("<|vision_start|>"),
        "vision_end_token_id": to_id("<|vision_end|>"),
    }


def qwen_text_encoder(tokenizer, hidden_size, num_layers=2):
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    text = {
        **_decoder(tokenizer, hidden_size, num_layers),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "max_position_embeddings": 2048,
        "rope_parameters": rope,
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, **_qwen_vision(tokenizer, hidden_size))
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3_vl(cls, tokenizer, hidden_size, num_layers):
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [8, 4, 4]}
    text = {
        **_decoder(tokenizer, hidden_size, num_layers),
        "max_position_embeddings": 2048,
        "rope_parameters": {**rope, "mrope_interleaved": True},
    }
    parts = _qwen_vision(tokenizer, hidden_size)
    parts["vision_config"] |= {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
    return cls(transformers.Qwen3VLConfig(text_config=text, **parts)).eval()


SMALL_VISION = {"hidden_size": 32, "intermediate_size": 64, "image_size": 28}
SMALL_VISION |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)


def mistral3(tokenizer, hidden_size, num_layers):
    text = {
        "model_type": "mistral",
        **_decoder(tokenizer, hidden_size, num_layers),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    vision = {**SMALL_VISION, "model_type": "pixtral", "head_dim": 32}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    return transformers.Mistral3ForConditionalGeneration(config).eval()


def gemma_tokenizer(captions, max_length):
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    return transformers.GemmaTokenizer(
        **_train_bpe(captions, vocab_size=512, special_tokens=special), model_max_length=max_length
    )


def gemma3(tokenizer, hidden_size, num_layers):
    text = {**_decoder(tokenizer, hidden_size, num_layers), "query_pre_attn_scalar": 32}
    vision = {**SMALL_VISION, "patch_size": 14, "vision_use_head": False}
    parts = {"text_config": text, "vision_config": vision}
    config = transformers.Gemma3Config(**parts, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def qwen_image_processor(**options):
    size = {"shortest_edge": 28**2, "longest_edge": (4 * 28) ** 2}
    return Qwen2VLImageProcessorPil(size=size, **options)


def qwen_processor(tokenizer):
    return image_processor("Qwen2VLProcessor")(qwen_image_processor(), tokenizer)


SPECIAL = ("bos", "eos", "pad")


def clip_tokenizer(captions):
    words = sorted({word for caption in captions for word in caption.lower().split()})
    characters = sorted({character for word in words for character in word})
    pieces = [*characters, *(f"{character}</w>" for character in characters)]
    tokens = [*pieces, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def clip_text_encoder(tokenizer, hidden_size):
    """A two-layer `CLIPTextModel`; its pooled output has `hidden_size` numbers."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // 32,
        projection_dim=hidden_size,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL},
    )
    return transformers.CLIPTextModel(config).eval()


def t5_tokenizer(captions, max_length):
    words = sorted({word for caption in captions for word in caption.split()})
    characters = sorted({character for word in words for character in word})
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    scored += [(f"▁{word}", -1.0) for word in words if len(word) > 1]
    scored += [(character, -8.0) for character in characters]
    return transformers.T5Tokenizer(vocab=scored, extra_ids=0, model_max_length=max_length)


def t5_encoder(tokenizer, hidden_size, *, is_umt5=False):
    kind = "UMT5" if is_umt5 else "T5"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        d_kv=32,
        d_ff=hidden_size * 2,
        num_layers=2,
        num_heads=hidden_size // 32,
        feed_forward_proj="gated-gelu",
    )
    return getattr(transformers, f"{kind}EncoderModel")(config).eval()


def image_vae(family):
    # Random weights then make latents of about unit variance, as published ones do.
    config = {**family.parts.vae_config, **SIZES["image-vae"], "scaling_factor": 3.0}
    return diffusers.AutoencoderKL(**config).eval()


def qwen_vae():
    return diffusers.AutoencoderKLQwenImage(**SIZES["qwen-vae"]).eval()


def dynamic_scheduler(low, high, **options):
    """A scheduler whose shift follows the line between two points (tokens, logarithm)."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=low[0],
        base_shift=low[1],
        max_image_seq_len=high[0],
        max_shift=high[1],
        **options,
    )


@torch.no_grad()
def invert_input_layer(output, input_weight):
    """Let a transformer's last layer undo its first, so that it begins by predicting its input:
    between random projections an adapter could learn almost nothing in a few steps."""
    output.weight.copy_(torch.linalg.pinv(input_weight))
    if output.bias is not None:
        output.bias.zero_()
