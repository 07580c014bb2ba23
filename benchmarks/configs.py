"""Mid-size transformers of every family: the real classes, a few hundred channels wide, four to eight blocks."""

from collections.abc import Mapping
from typing import Any

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
    "kandinsky5-image-lite": KANDINSKY,
    "kandinsky5-video-lite": {**KANDINSKY, "visual_cond": True},
}
