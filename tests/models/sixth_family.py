"""A family that autotune does not have, as somebody would add it: AuraFlow."""

from autotune.models.family import Defaults, Family, Parts, PublishedModel

BLOCK = r"(joint|single)_transformer_blocks\.\d+"
ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
MLP = r"ff(_context)?\.(linear_1|linear_2|out_projection)"
TEXT_TOKENS = 256


class AuraFlow(Family):
    """Unpacked latents; one T5 as the text encoder."""

    name = "aura-flow"
    models = (PublishedModel("fal/AuraFlow-v0.3", {"pos_embed_max_size": 9216}, Parts()),)
    pipeline_class = "AuraFlowPipeline"
    transformer_class = "AuraFlowTransformer2DModel"
    tiny_config = {  # noqa: RUF012
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "caption_projection_dim": 128,
    }
    components = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=TEXT_TOKENS,
        timestep_shift=1.73,
        preview_steps=50,
        sampling_guidance=3.5,
    )
    casts_to_weight_dtype = True
    size_multiple_px = 16
    max_side_px = 96 * size_multiple_px
    max_text_tokens = TEXT_TOKENS
    target_sets = {  # noqa: RUF012
        "attention": rf"{BLOCK}\.({ATTENTION})",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|norm1(_context)?\.linear)",
    }
    block_lists = ("joint_transformer_blocks", "single_transformer_blocks")

    def sample_shapes(self, config, bucket, text_tokens, num_controls=1):
        return {
            "latents": (
                config.get("in_channels", 4),
                1,
                bucket.height_px // 8,
                bucket.width_px // 8,
            ),
            "prompt_embeds": (text_tokens, config.get("joint_attention_dim", 2048)),
        }

    def encode_caption(self, pipeline, caption, controls=()):
        return {
            "prompt_embeds": pipeline.encode_prompt(caption, do_classifier_free_guidance=False)[0][
                0
            ]
        }

    def count_text_tokens(self, folder, captions, controls=()):
        return [TEXT_TOKENS] * len(captions)

    def encode_pixels(self, pipeline, pixels):
        latents = pipeline.vae.encode(pixels[:, 0][None]).latent_dist.mode()[0, :, None]
        return latents * pipeline.vae.config.scaling_factor

    def predict(self, transformer, noisy, levels, batch):
        return transformer(
            hidden_states=noisy[:, :, 0],
            encoder_hidden_states=batch["prompt_embeds"],
            timestep=levels,
            return_dict=False,
        )[0][:, :, None]
