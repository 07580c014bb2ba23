"""Tiny transformers of the real classes, and machines to predict for."""

from typing import Any

import torch

from autotune.machine.catalog import load_catalog, profile_of_gpu
from autotune.models.family import Family
from autotune.models.registry import FAMILIES
from autotune.plan.hardware import Device, HardwareProfile, Host, Versions
from autotune.plan.workload import Bucket, ModelSpec, Workload

HEADS = {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 48}
QWEN = {**HEADS, "num_layers": 5, "axes_dims_rope": (8, 12, 12)}
KANDINSKY = {
    "in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 48, "in_text_dim2": 16,
    "time_dim": 32, "model_dim": 64, "ff_dim": 128, "num_text_blocks": 2, "num_visual_blocks": 5,
    "axes_dims": (8, 12, 12),
}  # fmt: skip
# Wider than a patch, as published: the loss on a CPU copies latents, which the trace does not see.
WAN = {
    "num_layers": 5, "attention_head_dim": 32, "num_attention_heads": 8, "ffn_dim": 512,
    "text_dim": 48,
}  # fmt: skip
FLUX = {**HEADS, "num_layers": 4, "num_single_layers": 5}
FLUX1 = {**FLUX, "axes_dims_rope": (8, 12, 12), "pooled_projection_dim": 16}
FLUX2 = {**FLUX, "axes_dims_rope": (8, 8, 8, 8)}
CHROMA = {"axes_dims_rope": (8, 12, 12), "approximator_hidden_dim": 64, "approximator_layers": 2}
TINY: dict[str, dict[str, Any]] = {
    "qwen-image": QWEN,
    "qwen-image-edit": QWEN,
    "flux1-dev": {**FLUX1, "guidance_embeds": True},
    "flux1-kontext": {**FLUX1, "guidance_embeds": True},
    "chroma": {**FLUX, **CHROMA},
    "z-image": {
        "dim": 64, "n_heads": 2, "n_kv_heads": 2, "n_layers": 5, "n_refiner_layers": 2,
        "cap_feat_dim": 48, "axes_dims": [8, 12, 12],
    },
    "flux2-klein": {**FLUX2, "guidance_embeds": False},
    "flux2-dev": FLUX2,
    "sd3.5": {
        **HEADS, "num_layers": 5, "caption_projection_dim": 64, "pooled_projection_dim": 16,
        "pos_embed_max_size": 32, "dual_attention_layers": (0, 1, 2), "qk_norm": "rms_norm",
    },
    "sdxl": {
        **FAMILIES["sdxl"].models[0].config, "block_out_channels": (32, 64, 64),
        "transformer_layers_per_block": (1, 2, 5),
        "attention_head_dim": (1, 2, 2), "norm_num_groups": 8, "cross_attention_dim": 48,
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64,
    },
    "krea-2": {
        "num_layers": 5, "attention_head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 256, "timestep_embed_dim": 64,
        "text_hidden_dim": 64, "num_text_layers": 3, "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2, "text_intermediate_size": 128,
        "axes_dims_rope": (8, 12, 12),
    },
    "anima": {
        "num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 5, "text_embed_dim": 48,
        "adaln_lora_dim": 16, "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None,
    },
    "qwen-image-2.1": {
        "num_layers": 5, "attention_head_dim": 32, "num_attention_heads": 4, "context_in_dim": 48,
        "axes_dims_rope": (8, 12, 12),
    },
    "ltx-2.3": {
        "num_layers": 5, "rope_type": "split", "use_prompt_embeddings": False,
        "perturbed_attn": True, "gated_attn": True, "cross_attn_mod": True,
        "audio_gated_attn": True, "audio_cross_attn_mod": True, "num_attention_heads": 4,
        "attention_head_dim": 32, "cross_attention_dim": 128, "audio_num_attention_heads": 4,
        "audio_attention_head_dim": 16, "audio_cross_attention_dim": 64,
    },
    "wan-2.1": WAN,
    "wan-2.2-14b": WAN,
    "wan-2.2": {**WAN, "in_channels": 48, "out_channels": 48},
    "kandinsky5-image-lite": KANDINSKY,
    "kandinsky5-video-lite": {**KANDINSKY, "visual_cond": True},
}  # fmt: skip


def cpu() -> HardwareProfile:
    memory = {"memory_kind": "host", "memory_kind_reason": "", "budget_reason": ""}
    device = Device(kind="cpu", index=0, name="cpu", budget_bytes=1 << 34, **memory)
    host = Host(
        cpu="cpu",
        logical_cores=2,
        memory_bytes=1 << 34,
        available_memory_bytes=1 << 34,
        system="Linux",
        memory_model="linux",
    )
    return HardwareProfile(device=device, host=host, versions=Versions(python="3.11"))


def gpu(name: str) -> HardwareProfile:
    return profile_of_gpu(next(card for card in load_catalog() if card.id == name))


def workload_of(name: str, **changes: Any) -> Workload:
    family, config = FAMILIES[name], TINY.get(name, {})
    config = changes.pop("config", config)
    frames = 1 + family.frames_per_latent if family.can_train_clips else 1
    blocks = num_blocks(family, config)
    known = {"family": name, "architecture": "tiny", "num_parameters": 1, "name": name}
    values: dict[str, Any] = {
        "model": ModelSpec(num_blocks=blocks, **known),
        "resolution_px": 96,
        "buckets": (Bucket(width_px=96, height_px=64, num_frames=frames, num_items=3),),
        "max_text_tokens": 12,
        "text_padding": "exact",
        "rank": 4,
        "lora_alpha": 4.0,
        "targets": "attention",
        "num_control_images": min(1, family.max_controls),
        "effective_batch_size": 2,
    }
    return Workload(**{**values, **changes})


def num_blocks(family: Family, config: dict[str, Any]) -> int:
    with torch.device("meta"):
        return len(family.blocks(family.build_transformer(config)))
