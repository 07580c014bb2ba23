"""A small Chroma pipeline."""

from collections.abc import Sequence
from typing import Any

from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from autotune.models.family import Family
from tests.small.parts import flux_vae, invert_input_layer, t5_encoder, t5_tokenizer


def build_pipeline(family: Family, captions: Sequence[str]) -> Any:
    """Build the pipeline: 2 double-stream and 2 single-stream blocks of width 128."""
    tokenizer = t5_tokenizer(captions, max_length=512)
    text_encoder = t5_encoder(tokenizer, hidden_size=128)
    transformer = ChromaTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        axes_dims_rope=(8, 12, 12),
        approximator_hidden_dim=128,
        approximator_layers=2,
    )
    invert_input_layer(transformer.proj_out, transformer.x_embedder.weight)
    vae = flux_vae()
    return ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
