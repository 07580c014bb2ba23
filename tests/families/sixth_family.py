"""A family that autotune does not have, as somebody would add it: Stable Diffusion 3, without its T5 encoder."""

from autotune.families.base import Family
from autotune.families.published import Defaults, Parts, PublishedModel
from autotune.families.small.parts import clip_tokenizer

BLOCK = r"transformer_blocks\.\d+"
ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
MLP = r"ff(_context)?\.net\.(0\.proj|2)"


class StableDiffusion3(Family):
    """Unpacked latents; two CLIP encoders."""

    name = "stable-diffusion-3"
    models = (PublishedModel("stabilityai/stable-diffusion-3-medium-diffusers", {}, Parts()),)
    pipeline_class = "StableDiffusion3Pipeline"
    transformer_class = "SD3Transformer2DModel"
    tiny_config = {  # noqa: RUF012
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "caption_projection_dim": 128,
    }
    components = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
    defaults = Defaults(
        rank=16,
        lora_alpha=16.0,
        learning_rate=1e-4,
        weight_decay=1e-3,
        effective_batch_size=4,
        resolution_px=1024,
        text_tokens=77,
        timestep_shift=3.0,
        preview_steps=28,
        sampling_guidance=7.0,
    )
    size_multiple_px = 16
    max_side_px = 96 * size_multiple_px
    max_text_tokens = 512
    target_sets = {  # noqa: RUF012
        "attention": rf"{BLOCK}\.({ATTENTION})",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|norm1(_context)?\.linear)",
    }
    block_lists = ("transformer_blocks",)

    def load_pipeline(self, folder, **components):
        absent = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
        return super().load_pipeline(folder, **{**absent, **components})

    def sample_shapes(self, config, bucket, text_tokens, num_controls=1):
        return {
            "latents": (config.get("in_channels", 16), 1, bucket.height_px // 8, bucket.width_px // 8),
            "prompt_embeds": (text_tokens, config.get("joint_attention_dim", 4096)),
            "pooled_prompt_embeds": (config.get("pooled_projection_dim", 2048),),
        }

    def encode_caption(self, pipeline, caption, controls=()):
        prompt, _, pooled, _ = pipeline.encode_prompt(caption, None, None, do_classifier_free_guidance=False)
        return {"prompt_embeds": prompt[0], "pooled_prompt_embeds": pooled[0]}

    def count_text_tokens(self, folder, captions, controls=()):
        return [77 + 256] * len(captions)

    def encode_pixels(self, pipeline, pixels):
        config = pipeline.vae.config
        latents = pipeline.vae.encode(pixels[:, 0][None]).latent_dist.mode()[0, :, None]
        return (latents - config.shift_factor) * config.scaling_factor

    def predict(self, transformer, noisy, levels, batch):
        return transformer(
            hidden_states=noisy[:, :, 0],
            encoder_hidden_states=batch["prompt_embeds"],
            pooled_projections=batch["pooled_prompt_embeds"],
            timestep=levels * 1000,
            return_dict=False,
        )[0][:, :, None]

    def has_attention_mask(self, micro_batch_size, text_padding):
        return False

    def write_small_pipeline(self, folder, captions, seed):
        import torch
        from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
        from transformers import CLIPTextConfig, CLIPTextModelWithProjection

        from autotune.families.small.parts import flux_vae

        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(captions)
        config = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            projection_dim=32,
            num_attention_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        transformer = SD3Transformer2DModel(
            sample_size=8,
            in_channels=16,
            out_channels=16,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=64,
            pooled_projection_dim=64,
            pos_embed_max_size=96,
        )
        StableDiffusion3Pipeline(
            transformer=transformer,
            vae=flux_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=CLIPTextModelWithProjection(config).eval(),
            tokenizer=tokenizer,
            text_encoder_2=CLIPTextModelWithProjection(config).eval(),
            tokenizer_2=tokenizer,
            text_encoder_3=None,
            tokenizer_3=None,
        ).save_pretrained(folder)
