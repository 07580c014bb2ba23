"""A small AuraFlow pipeline, for the family that tests add."""

from collections.abc import Sequence
from typing import Any

from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

from autotune.models.family import Family
from tests.small.parts import flux_vae, t5_encoder, t5_tokenizer


def build_pipeline(family: Family, captions: Sequence[str]) -> Any:
    tokenizer = t5_tokenizer(captions, max_length=family.max_text_tokens)
    transformer = AuraFlowTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_mmdit_layers=1,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pos_embed_max_size=9216,
    )
    return AuraFlowPipeline(
        transformer=transformer,
        vae=flux_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        text_encoder=t5_encoder(tokenizer, hidden_size=64, is_umt5=True),
        tokenizer=tokenizer,
    )
