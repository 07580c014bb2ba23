"""Small LTX-2.3 and 2.5 pipelines."""

from collections.abc import Sequence
from typing import Any

import diffusers
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

from autotune.models.facts import Config
from autotune.models.family import Family
from tests.small.parts import dynamic_scheduler, gemma3, gemma_tokenizer, invert_input_layer

CHANNELS, SOUND_CHANNELS = 32, 8
WIDTH, SOUND_WIDTH, TEXT_WIDTH = 128, 64, 64


def build_later_parts(family: Family, captions: Sequence[str]) -> dict[str, Any]:
    """Of LTX-2.5: Gemma 4, and a head that tells how long a clip should be."""
    model = next(each for each in family.models if each.name == "ltx-2.5")
    parts = build_parts(family, captions, model.config)
    text = {
        "vocab_size": len(parts["tokenizer"]), "hidden_size": TEXT_WIDTH, "num_hidden_layers": 2,
        "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "global_head_dim": 32,
    }  # fmt: skip
    kind = transformers.Gemma4UnifiedForConditionalGeneration
    parts["text_encoder"] = kind(transformers.Gemma4UnifiedConfig(text_config=text)).eval()
    parts["duration_head"] = LTX2DurationHead(WIDTH, SOUND_WIDTH).eval()
    return parts


def build_parts(
    family: Family, captions: Sequence[str], config: Config | None = None
) -> dict[str, Any]:
    tokenizer = gemma_tokenizer(captions, max_length=1024)
    text_encoder = gemma3(tokenizer, hidden_size=TEXT_WIDTH, num_layers=2)
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=4,
        attention_head_dim=WIDTH // 4, cross_attention_dim=WIDTH, audio_in_channels=SOUND_CHANNELS,
        audio_out_channels=SOUND_CHANNELS, audio_num_attention_heads=4,
        audio_attention_head_dim=SOUND_WIDTH // 4, audio_cross_attention_dim=SOUND_WIDTH,
        num_layers=4, **(config or family.transformer_config),
    )  # fmt: skip
    invert_input_layer(transformer.proj_out, transformer.proj_in.weight)
    return {
        "scheduler": dynamic_scheduler((1024, 0.95), (4096, 2.05), shift_terminal=0.1),
        "vae": _video_vae(family),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(
            base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16
        ).eval(),
        "vocoder": LTX2Vocoder(
            in_channels=32, hidden_channels=32, upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2], resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]],
        ).eval(),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "connectors": _connectors(num_layers=3),
        "transformer": transformer,
    }  # fmt: skip


def _connectors(num_layers: int) -> Any:
    return LTX2TextConnectors(
        caption_channels=TEXT_WIDTH, text_proj_in_factor=num_layers,
        video_connector_num_attention_heads=4, audio_connector_num_attention_heads=4,
        video_connector_attention_head_dim=WIDTH // 4,
        audio_connector_attention_head_dim=SOUND_WIDTH // 4, video_connector_num_layers=1,
        audio_connector_num_layers=1, video_gated_attn=True, audio_gated_attn=True,
        rope_type="split", per_modality_projections=True, video_hidden_dim=WIDTH,
        audio_hidden_dim=SOUND_WIDTH, proj_bias=True,
    ).eval()  # fmt: skip


def _video_vae(family: Family) -> Any:
    small = {
        "latent_channels": CHANNELS, "block_out_channels": (8, 16, 32, 32),
        "decoder_block_out_channels": (8, 16, 16, 32), "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 5,
    }  # fmt: skip
    return diffusers.AutoencoderKLLTX2Video(**{**family.models[0].parts.vae_config, **small}).eval()
