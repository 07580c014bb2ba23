"""Kandinsky 5.0 for images and for video: text blocks, then visual blocks that attend to the text.

The transformer takes latents with the channels last and no mask of the prompt, so captions of
different lengths go through it one length at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.models import facts, family, latents
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, nn, torch

MAX_TEXT_TOKENS = 512  # length to which the pipelines cut prompts
POSITIONS = 128  # maximum rows, columns and latent frames of the transformer's rotary embedding
BLOCK = r"(text|visual)_transformer_blocks\.\d+"
ATTENTION = r"(self|cross)_attention\.(to_query|to_key|to_value|out_layer)"
MLP = r"feed_forward\.(in_layer|out_layer)"


class Kandinsky5(latents.QwenProcessor, family.Family):
    """Prompts of Qwen2.5-VL at their own length; CLIP's pooled output joins the timestep."""

    transformer_class = "Kandinsky5Transformer3DModel"
    components = (*family.COMPONENTS, "text_encoder_2", "tokenizer_2")
    processor = ("tokenizer", "Qwen2VLProcessor")
    latent_channels = ("in_visual_dim", 4)
    prompt_size = (("in_text_dim", 3584),)
    pooled_size = ("in_text_dim2", 768)
    max_text_tokens = MAX_TEXT_TOKENS
    max_side_px = POSITIONS * family.Family.size_multiple_px
    target_sets = latents.adapted_layers(
        BLOCK, ATTENTION, MLP, r"(text|visual)_modulation\.out_layer"
    )
    block_lists = ("text_transformer_blocks", "visual_transformer_blocks")
    fp16_overflow = "ComfyUI runs it in bf16 or fp32 alone (comfy/supported_models.py, 01f03bbd)"
    modulation = facts.ModulationLayers(
        rf"{BLOCK}\.(text|visual)_modulation|out_layer\.modulation",
        ("time_embeddings", "pooled_text_embeddings"),
        inputs=("pooled_prompt_embeds",),
    )
    attention_layouts = (
        facts.AttentionLayout(
            "Kandinsky5AttnProcessor",
            "matrix",
            "rotary_emb",
            facts.Stream("to_query", "to_key", "to_value", "query_norm", "key_norm", "out_layer"),
            rounds_to_bf16=True,
        ),
    )

    def build_transformer(self, config: facts.Config) -> nn.Module:
        attention = config.get("attention_type", "regular")
        if attention != "regular":
            what = f"this {self.name} uses {attention} attention, which autotune cannot train"
            hint = "use a checkpoint with regular attention: the 5-second models have it"
            raise InvalidInput(what, hint=hint)
        return super().build_transformer(config)

    def count_text_tokens(
        self, folder: Path, captions: family.Texts, controls: family.Sizes = ()
    ) -> list[int]:
        from diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i import prompt_clean

        stock = latents.build_empty_pipeline(self.pipeline_class)
        texts = [stock.prompt_template.format(prompt_clean(caption)) for caption in captions]
        start = stock.prompt_template_encode_start_idx
        # The pipeline cuts characters of a long prompt, so a token or two fewer may remain.
        lengths = latents.count_tokens(folder, texts)
        return [min(length - start, MAX_TEXT_TOKENS) for length in lengths]

    def predict(
        self, transformer: Any, noisy: Tensor, levels: Tensor, batch: family.Batch
    ) -> Tensor:
        if "prompt_mask" not in batch:
            return self._predict_one_length(transformer, noisy, levels, batch)
        lengths = batch["prompt_mask"].sum(dim=1)
        velocity = torch.empty_like(noisy)
        for length in sorted(set(lengths.tolist())):
            chosen = lengths == length
            part = {
                "prompt_embeds": batch["prompt_embeds"][chosen, :length],
                "pooled_prompt_embeds": batch["pooled_prompt_embeds"][chosen],
            }
            velocity[chosen] = self._predict_one_length(
                transformer, noisy[chosen], levels[chosen], part
            )
        return velocity

    def _predict_one_length(
        self, transformer: Any, noisy: Tensor, levels: Tensor, batch: family.Batch
    ) -> Tensor:
        _, _, frames, height, width = noisy.shape
        visual = noisy.permute(0, 2, 3, 4, 1)
        if family.unwrap_model(transformer).visual_cond:
            # Text to video conditions on no image: zeros, and a mask channel that says so.
            visual = torch.cat(
                [visual, torch.zeros_like(visual), torch.zeros_like(visual[..., :1])], dim=-1
            )
        prompt = batch["prompt_embeds"]
        velocity: Tensor = transformer(
            hidden_states=visual,
            encoder_hidden_states=prompt,
            pooled_projections=batch["pooled_prompt_embeds"],
            timestep=(levels * 1000).to(noisy.dtype),
            visual_rope_pos=[
                torch.arange(length, device=noisy.device)
                for length in (frames, height // self.patch, width // self.patch)
            ],
            text_rope_pos=torch.arange(prompt.shape[1], device=noisy.device),
            scale_factor=self._rope_scale(height * self.latent_px, width * self.latent_px),
            return_dict=False,
        )
        return velocity.permute(0, 4, 1, 2, 3)

    def _rope_scale(self, height_px: int, width_px: int) -> tuple[float, float, float]:
        # By which the pipeline divides positions in time, height and width.
        return (1.0, 1.0, 1.0)


class Kandinsky5Image(latents.ImageLatents, Kandinsky5):
    """Image Lite, text to image: 50 visual blocks, and FLUX's VAE."""

    name = "kandinsky5-image-lite"
    models, defaults, tiny_config = facts.family_facts(name)
    pipeline_class = "Kandinsky5T2IPipeline"

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        images = pixels[:, 0][None].to(vae.dtype)
        encoded: Tensor = vae.encode(images).latent_dist.mode()[0, :, None].to(pixels.dtype)
        # The pipeline undoes the scale alone and knows no shift, unlike FLUX with the same VAE.
        return encoded * float(vae.config.scaling_factor)

    def call_options(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: family.Images
    ) -> family.Options:
        # The pipeline would replace any other size by one of its seven.
        pipeline.resolutions = [(bucket.width_px, bucket.height_px)]
        return super().call_options(pipeline, prompt, bucket, controls)


class Kandinsky5Video(Kandinsky5):
    """Video Lite of 5 seconds, text to video; images train it as well. HunyuanVideo's VAE."""

    name = "kandinsky5-video-lite"
    models, defaults, tiny_config = facts.family_facts(name)
    pipeline_class = "Kandinsky5T2VPipeline"
    frames_per_latent = 4
    max_frames = 4 * (POSITIONS - 1) + 1

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        clip = pixels[None, :, : self.whole_frames(pixels.shape[1])]
        encoded: Tensor = vae.encode(clip.to(vae.dtype)).latent_dist.mode()[0]
        return encoded.to(pixels.dtype) * float(vae.config.scaling_factor)

    def _rope_scale(self, height_px: int, width_px: int) -> tuple[float, float, float]:
        # As `Kandinsky5T2VPipeline._get_scale_factor`.
        near_480p = all(480 <= side <= 854 for side in (height_px, width_px))
        return (1, 2, 2) if near_480p else (1, 3.16, 3.16)
