"""Mid-size transformers of every family: the real classes, a few hundred channels wide, four to
eight blocks."""

from collections.abc import Mapping
from typing import Any

from autotune.models.facts import family_facts

QWEN = {
    "num_layers": 6,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 256,
    "axes_dims_rope": (16, 24, 24),
}
KANDINSKY = {
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "time_dim": 64,
    "model_dim": 256,
    "ff_dim": 1024,
    "in_text_dim": 256,
    "num_text_blocks": 2,
    "num_visual_blocks": 6,
    "axes_dims": (16, 24, 24),
}
WAN = {
    "num_layers": 6,
    "attention_head_dim": 64,
    "num_attention_heads": 6,
    "ffn_dim": 1024,
    "text_dim": 256,
}
MID: Mapping[str, Mapping[str, Any]] = {
    "qwen-image": QWEN,
    "qwen-image-edit": QWEN,
    "flux1-dev": {
        "num_layers": 3,
        "num_single_layers": 5,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "joint_attention_dim": 256,
        "axes_dims_rope": (16, 24, 24),
        "guidance_embeds": True,
    },
    "flux2-klein": {
        "num_layers": 2,
        "num_single_layers": 6,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "joint_attention_dim": 256,
        "axes_dims_rope": (16, 16, 16, 16),
        "guidance_embeds": False,
    },
    "z-image": {
        "dim": 256,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 6,
        "n_refiner_layers": 2,
        "cap_feat_dim": 256,
        "axes_dims": [16, 24, 24],
    },
    "krea-2": {
        "num_layers": 6,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "timestep_embed_dim": 64,
        "text_hidden_dim": 256,
        "num_text_layers": 3,
        "text_num_attention_heads": 4,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 512,
        "axes_dims_rope": (16, 24, 24),
    },
    "sdxl": {
        **family_facts("sdxl")[0][0].config,
        "block_out_channels": (64, 128, 256),
        "transformer_layers_per_block": (1, 2, 4),
        "attention_head_dim": (1, 2, 4),
        "cross_attention_dim": 256,
        "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": 256,
    },
    "wan-2.1": WAN,
    "wan-2.2": {**WAN, "in_channels": 48, "out_channels": 48},
    "kandinsky5-image-lite": KANDINSKY,
    "kandinsky5-video-lite": {**KANDINSKY, "visual_cond": True},
}
