"""What the models' own folders on the hub say of their transformer and VAE, without `_` keys.

Chroma's is that of TensorStack/Chroma1-HD-ts: with two keys that its class does not take.
"""

# fmt: off
QWEN = {
    "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "guidance_embeds": False,
    "in_channels": 64, "joint_attention_dim": 3584, "num_attention_heads": 24, "num_layers": 60,
    "out_channels": 16, "patch_size": 2, "pooled_projection_dim": 768,
}
QWEN_VAE = {
    "attn_scales": [], "base_dim": 96, "dim_mult": [1, 2, 4, 4], "dropout": 0.0,
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916,
    ],
    "num_res_blocks": 2, "temperal_downsample": [False, True, True], "z_dim": 16,
}
FLUX = {
    "attention_head_dim": 128, "guidance_embeds": True, "in_channels": 64,
    "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19,
    "num_single_layers": 38, "patch_size": 1, "pooled_projection_dim": 768,
}
FLUX_VAE = {
    "act_fn": "silu", "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4, "force_upcast": True, "in_channels": 3,
    "latent_channels": 16, "latents_mean": None, "latents_std": None, "layers_per_block": 2,
    "mid_block_add_attention": True, "norm_num_groups": 32, "out_channels": 3, "sample_size": 1024,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": False, "use_quant_conv": False,
}
CHROMA = {
    "approximator_hidden_dim": 5120, "approximator_layers": 5, "approximator_num_channels": 64,
    "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "guidance_embeds": False,
    "in_channels": 64, "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19,
    "num_single_layers": 38, "out_channels": None, "patch_size": 1, "pooled_projection_dim": 768,
}
# fmt: on

CONFIGS = {  # of the transformer and of the VAE, by family
    "qwen-image": (QWEN, QWEN_VAE),
    "flux1-dev": (FLUX, FLUX_VAE),
    "chroma": (CHROMA, FLUX_VAE),
}
