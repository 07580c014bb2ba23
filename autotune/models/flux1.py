"""FLUX.1 dev, FLUX.1 Kontext, and Chroma, which is made from FLUX.1 schnell."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from autotune.models import facts, family, latents
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, nn, torch

TEXT_TOKENS = 512  # of every prompt: the model attends to the padding, too
BLOCK = r"(single_)?transformer_blocks\.\d+"
MLP = r"ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out"


class Flux1Dev(latents.ImageLatents, family.Family):
    """Text to image. Latents are packed in 2x2 patches; prompts always have the same length."""

    name = "flux1-dev"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"flux-dev": "flux1-dev", "flux": "flux1-dev"}
    fine_tunes = ("flux 1 krea dev", "flux 1 fill dev")
    pipeline_class = "FluxPipeline"
    transformer_class = "FluxTransformer2DModel"
    components: ClassVar[tuple[str, ...]] = (*family.COMPONENTS, "text_encoder_2", "tokenizer_2")
    casts_to_weight_dtype = True
    latent_channels = ("in_channels", 64)
    counts_packed = True
    pooled_size: ClassVar[tuple[str, int] | None] = ("pooled_projection_dim", 768)
    encode_options = {"prompt_2": None}
    max_text_tokens = TEXT_TOKENS
    caption_tokenizer = "tokenizer_2"
    target_sets = latents.adapted_layers(
        BLOCK, latents.ATTENTION, MLP, r"norm(1|1_context)?\.linear"
    )
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    modulation: ClassVar[facts.ModulationLayers | None] = facts.ModulationLayers(
        rf"{BLOCK}\.norm(1|1_context)?|norm_out",
        ("time_text_embed",),
        inputs=("pooled_prompt_embeds",),
    )
    attention_layouts = (
        facts.AttentionLayout(
            "FluxAttnProcessor", "cos_sin", "image_rotary_emb", text=facts.ADDED_TEXT
        ),
    )

    def predict(
        self, transformer: Any, noisy: Tensor, levels: Tensor, batch: family.Batch
    ) -> Tensor:
        prompt, images = batch["prompt_embeds"], latents.with_controls(noisy, batch)
        tokens = [latents.pack(image) for image in images]
        # An image token's position is (number of the image, row, column); text has none.
        positions = [
            torch.cartesian_prod(
                torch.tensor([number]),
                *(torch.arange(side // latents.PATCH) for side in image.shape[3:]),
            )
            for number, image in enumerate(images)
        ]
        velocity: Tensor = transformer(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=levels.to(noisy.dtype),
            encoder_hidden_states=prompt,
            txt_ids=noisy.new_zeros(prompt.shape[1], 3),
            img_ids=latents.send(torch.cat(positions).to(noisy.dtype), noisy.device),
            return_dict=False,
            **self.conditioning(transformer, levels, batch, sum(part.shape[1] for part in tokens)),
        )[0]
        return latents.unpack(velocity[:, : tokens[0].shape[1]], noisy.shape)

    def conditioning(
        self, transformer: Any, levels: Tensor, batch: family.Batch, num_image_tokens: int
    ) -> family.Options:
        """Return what the transformer takes besides tokens, their positions and the noise level."""
        guidance = self.guidance_input(transformer, levels, batch)
        return {"guidance": guidance, "pooled_projections": batch["pooled_prompt_embeds"]}


class Flux1Kontext(Flux1Dev):
    """Edits one control image. Training and previews show it in the size of the image."""

    name = "flux1-kontext"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"kontext": "flux1-kontext", "flux-kontext": "flux1-kontext"}
    pipeline_class = "FluxKontextPipeline"
    max_controls = 1

    def call_options(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: family.Images
    ) -> family.Options:
        from PIL import Image, ImageOps

        self.check_num_controls(len(controls), "the prompt")
        size = (bucket.width_px, bucket.height_px)
        return {
            **super().call_options(pipeline, prompt, bucket, controls),
            "image": ImageOps.fit(controls[0], size, Image.Resampling.LANCZOS),
            # The pipeline would make a megapixel of both.
            "max_area": bucket.width_px * bucket.height_px,
            "_auto_resize": False,
        }


class Chroma(Flux1Dev):
    """Text to image. Prompts have their own length: padding is masked and takes no position."""

    name = "chroma"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"chroma1": "chroma", "chroma-hd": "chroma"}
    pipeline_class = "ChromaPipeline"
    transformer_class = "ChromaTransformer2DModel"
    obsolete_config = frozenset({"guidance_embeds", "pooled_projection_dim"})  # FLUX.1's, unused
    caption_tokenizer = "tokenizer"
    components = family.COMPONENTS
    pooled_size = None
    masks_padding = True
    target_sets = latents.adapted_layers(BLOCK, latents.ATTENTION, MLP)
    modulation = None
    excluded = {
        "modulation": (
            "one network makes the modulation of all its blocks, and holds 3% of the weights"
        )
    }

    def build_transformer(self, config: facts.Config) -> nn.Module:
        transformer = super().build_transformer(config)
        made: Any = transformer.time_text_embed
        # Its guidance is always 0, which the class would send from the host in every pass.
        made.guidance_proj.register_forward_pre_hook(
            lambda _, guidance: made.mod_proj.new_zeros(len(guidance[0]))
        )
        return transformer

    def encode_caption(
        self, pipeline: Any, caption: str, controls: family.Pixels = ()
    ) -> family.Sample:
        prompt, _, mask, *_ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
        return {"prompt_embeds": prompt[0][mask[0] > 0]}

    def count_text_tokens(
        self, folder: Path, captions: family.Texts, controls: family.Sizes = ()
    ) -> list[int]:
        return [min(length + 1, TEXT_TOKENS) for length in latents.count_tokens(folder, captions)]

    def conditioning(
        self, transformer: Any, levels: Tensor, batch: family.Batch, num_image_tokens: int
    ) -> family.Options:
        mask = batch.get("prompt_mask")
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, num_image_tokens), value=True)
        return {"attention_mask": mask}

    def while_sampling(self, pipeline: Any, bucket: Bucket) -> AbstractContextManager[object]:
        # The pipeline adds its mask instead (huggingface/diffusers#13619): no padding, no mask.
        return mock.patch.object(pipeline, "_prepare_attention_mask", return_value=None)

    def call_options(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: family.Images
    ) -> family.Options:
        wanted, _, mask, unwanted, _, unwanted_mask = pipeline.encode_prompt(prompt)
        own, unwanted_own = mask[0] > 0, unwanted_mask[0] > 0
        return {
            "guidance_scale": self.defaults.sampling_guidance,
            "prompt_embeds": wanted[:, own],
            "prompt_attention_mask": mask[:, own],
            "negative_prompt_embeds": unwanted[:, unwanted_own],
            "negative_prompt_attention_mask": unwanted_mask[:, unwanted_own],
        }
