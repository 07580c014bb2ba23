"""Small Wan pipelines."""

import diffusers

from tests.small.parts import SIZES, invert_input_layer, t5_encoder, t5_tokenizer


def build_parts(family, captions):
    vae_config, boundary_ratio = family.parts.vae_config, family.pipeline_config["boundary_ratio"]
    is_5b = "patch_size" in vae_config
    tokenizer = t5_tokenizer(captions, max_length=512)
    text_encoder = t5_encoder(tokenizer, hidden_size=128, is_umt5=True)
    names = ("transformer", "transformer_2") if boundary_ratio else ("transformer",)
    extra = 20 if family.starts_from_picture else 0
    transformers = {name: _build_transformer(48 if is_5b else 16, extra) for name in names}
    vae = diffusers.AutoencoderKLWan(**{**vae_config, **SIZES["wan-vae"]}).eval()
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": vae,
        **transformers,
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=family.defaults.timestep_shift,
        ),
        "expand_timesteps": is_5b,
        "boundary_ratio": boundary_ratio,
    }


def _build_transformer(channels, extra):
    transformer = diffusers.WanTransformer3DModel(
        **SIZES["wan"],
        # Twice as wide as a patch: less is ill-conditioned to undo.
        num_attention_heads=channels // 4,
        in_channels=channels + extra,
        out_channels=channels,
    )
    # A patch goes in with its channels outermost and comes out with them innermost.
    transformer.patch_embedding.weight.data[:, channels:] *= 0.1
    patches = transformer.patch_embedding.weight[:, :channels].flatten(2).transpose(1, 2)
    invert_input_layer(transformer.proj_out, patches.flatten(1))
    return transformer
