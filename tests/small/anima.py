"""A small Anima pipeline."""

import diffusers
import transformers

from tests.small import parts


def build_parts(family, captions):
    tokenizer = parts.qwen_tokenizer(captions, "")
    t5_words = parts.t5_tokenizer(captions, max_length=512)
    conditioner = diffusers.AnimaTextConditioner(
        **parts.SIZES["anima-conditioner"], target_vocab_size=len(t5_words)
    )
    transformer = family.build_transformer({**family.transformer_config, **parts.SIZES["anima"]})
    parts.invert_input_layer(transformer.proj_out, transformer.patch_embed.proj.weight[:, :64])
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": parts.qwen_vae(),
        "text_encoder": parts.qwen3(
            transformers.Qwen3Model, tokenizer, hidden_size=64, num_layers=2
        ),
        "text_conditioner": conditioner.eval(),
        "tokenizer": tokenizer,
        "t5_tokenizer": t5_words,
        "transformer": transformer.eval(),
    }
