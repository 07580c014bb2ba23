"""FLUX.1 dev and Kontext; Chroma, which is made from FLUX.1 schnell; FLUX.2 klein and dev; FLUX.3
[klein], whose blocks for reference images are not trained: they see none here.

Six families in some 50 lines each, of which four change little of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from autotune.models import facts, family, latents, modular
from autotune.models.family import Batch, Family, Images, Options, Sample, Sizes, Texts
from autotune.models.latents import ATTENTION, load_tokenizer, send
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, nn, torch

TEXT_TOKENS = 512  # of every prompt of FLUX.1 and 2: they attend to the padding, too
BLOCK_1 = r"(single_)?transformer_blocks\.\d+"
MLP_1 = r"ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out"
BLOCK_2 = r"transformer_blocks\.\d+"
SINGLE_2 = r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
MLP_2 = r"ff(_context)?\.linear_(in|out)"
PAD_MULTIPLE_3 = 80  # to which the pipeline pads each prompt; the model attends to the padding, too
MAX_TEXT_TOKENS_3 = 8192
IMAGE_SCALE_3 = 0.5  # of rows and columns in a position


class Flux1Dev(latents.ImageLatents, Family):
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
    target_sets = latents.adapted_layers(BLOCK_1, ATTENTION, MLP_1, r"norm(1|1_context)?\.linear")
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    modulation: ClassVar[facts.ModulationLayers | None] = facts.ModulationLayers(
        rf"{BLOCK_1}\.norm(1|1_context)?|norm_out",
        ("time_text_embed",),
        inputs=("pooled_prompt_embeds",),
    )
    attention_layouts = (
        facts.AttentionLayout(
            "FluxAttnProcessor", "cos_sin", "image_rotary_emb", text=facts.ADDED_TEXT
        ),
    )

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
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
            img_ids=send(torch.cat(positions).to(noisy.dtype), noisy.device),
            return_dict=False,
            **self.conditioning(transformer, levels, batch, sum(part.shape[1] for part in tokens)),
        )[0]
        return latents.unpack(velocity[:, : tokens[0].shape[1]], noisy.shape)

    def conditioning(
        self, transformer: Any, levels: Tensor, batch: Batch, num_image_tokens: int
    ) -> Options:
        """Return what the transformer takes besides tokens, their positions and the noise level."""
        guidance = self.guidance_input(transformer, levels, batch)
        return {"guidance": guidance, "pooled_projections": batch["pooled_prompt_embeds"]}


class Flux1Kontext(Flux1Dev):
    """Edits one control image. Training and previews show it in the size of the image."""

    name = "flux1-kontext"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"kontext": "flux1-kontext", "flux-kontext": "flux1-kontext"}
    pipeline_class = "FluxKontextPipeline"
    min_controls = max_controls = 1

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
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
    target_sets = latents.adapted_layers(BLOCK_1, ATTENTION, MLP_1)
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

    def encode_caption(self, pipeline: Any, caption: str, controls: family.Pixels = ()) -> Sample:
        prompt, _, mask, *_ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
        return {"prompt_embeds": prompt[0][mask[0] > 0]}

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        return [min(length + 1, TEXT_TOKENS) for length in latents.count_tokens(folder, captions)]

    def conditioning(
        self, transformer: Any, levels: Tensor, batch: Batch, num_image_tokens: int
    ) -> Options:
        mask = batch.get("prompt_mask")
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, num_image_tokens), value=True)
        for block in family.unwrap_model(transformer).single_transformer_blocks:
            block.left_out_inputs = (mask,)  # by diffusers' class, where it recomputes
        return {"attention_mask": mask}

    def while_sampling(self, pipeline: Any, bucket: Bucket) -> AbstractContextManager[object]:
        # The pipeline adds its mask instead (huggingface/diffusers#13619): no padding, no mask.
        return mock.patch.object(pipeline, "_prepare_attention_mask", return_value=None)

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        wanted, _, mask, unwanted, _, unwanted_mask = pipeline.encode_prompt(prompt)
        own, unwanted_own = mask[0] > 0, unwanted_mask[0] > 0
        return {
            "guidance_scale": self.defaults.sampling_guidance,
            "prompt_embeds": wanted[:, own],
            "prompt_attention_mask": mask[:, own],
            "negative_prompt_embeds": unwanted[:, unwanted_own],
            "negative_prompt_attention_mask": unwanted_mask[:, unwanted_own],
        }


class Flux2Klein(Family):
    """Text to image. A single-stream block's attention and MLP_2 are one layer in and one out."""

    name = "flux2-klein"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"flux": "flux2-klein", "klein": "flux2-klein", "flux2-klein-base": "flux2-klein"}
    pipeline_class = "Flux2KleinPipeline"
    transformer_class = "Flux2Transformer2DModel"
    latent_px = 16  # the autoencoder's factor of 8, and 2x2 patches
    patch = 1
    latent_channels = ("in_channels", 128)
    prompt_size = (("joint_attention_dim", 15360),)
    max_text_tokens = TEXT_TOKENS
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK_2}\.{ATTENTION}|{SINGLE_2}",
        "attention+mlp": rf"{BLOCK_2}\.({ATTENTION}|{MLP_2})|{SINGLE_2}",
        # the modulation is outside of the blocks
        "all-linear": rf"{BLOCK_2}\.({ATTENTION}|{MLP_2})|{SINGLE_2}",
    }
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")
    excluded = {
        "modulation": (
            "its blocks share their modulation layers, which hold at most 4% of the weights"
        )
    }
    # Not of single-stream blocks: there one projection makes all.
    attention_layouts: ClassVar[tuple[facts.AttentionLayout, ...]] = (
        facts.AttentionLayout(
            "Flux2AttnProcessor", "cos_sin", "image_rotary_emb", text=facts.ADDED_TEXT
        ),
    )

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        latents: Tensor = vae.encode(pixels[:, 0][None].to(vae.dtype)).latent_dist.mode()
        patches = torch.nn.functional.pixel_unshuffle(latents, 2).to(pixels.dtype)
        # The autoencoder keeps mean and deviation of each channel in a batch norm.
        norm = vae.bn
        mean = norm.running_mean.view(1, -1, 1, 1)
        variance = norm.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps
        normalized: Tensor = (patches - mean) / variance.sqrt()
        return normalized[0, :, None]

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        return torch.nn.functional.pixel_shuffle(latents[:, :, 0], 2)

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        prompt = batch["prompt_embeds"]
        rows, columns = noisy.shape[3], noisy.shape[4]
        # A position is (time, row, column, place in the text).
        grid = torch.meshgrid(*(torch.arange(n) for n in (1, rows, columns, 1)), indexing="ij")
        text = torch.zeros(prompt.shape[1], 4)
        text[:, 3] = torch.arange(prompt.shape[1])
        velocity: Tensor = transformer(
            hidden_states=noisy.flatten(2).mT,
            encoder_hidden_states=prompt,
            timestep=levels,
            guidance=self.guidance_input(transformer, levels, batch),
            img_ids=send(torch.stack(grid, dim=-1).reshape(rows * columns, 4), noisy.device),
            txt_ids=send(text, noisy.device),
            return_dict=False,
        )[0]
        return velocity.mT.reshape(noisy.shape)


class Flux2Dev(Flux2Klein):
    """Text to image."""

    name = "flux2-dev"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"flux": "flux2-dev"}
    pipeline_class = "Flux2Pipeline"

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        # The chat template is all that the pipeline wants of Pixtral's processor.
        return super().load_pipeline(folder, **{"tokenizer": load_tokenizer(folder), **components})


class Flux3(latents.QwenProcessor, modular.ModularFamily, Flux2Klein):
    """Text to image, without the prompt upsampler. Latents are FLUX.2's."""

    name = "flux3"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"flux3-klein": "flux3", "flux3-klein-base": "flux3"}
    pipeline_class = "Flux3ModularPipeline"
    workflow = "text2image"
    text_blocks = ("text_encoder",)
    unused_blocks = ("prompt_upsampler",)
    components = ("transformer", "vae", "text_encoder", "tokenizer")
    processor = ("tokenizer", "Qwen3VLProcessor")
    transformer_class = "Flux3Transformer2DModel"
    prompt_size = (("joint_attention_dim", 20480),)
    max_text_tokens = MAX_TEXT_TOKENS_3
    separates_prompts = True
    max_side_px = 4096
    block_lists = ("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks")
    target_sets = latents.adapted_layers(
        r"(txt_mode_blocks|mode_blocks\.image|single_transformer_blocks)\.\d+",
        r"attn\.(to_q|to_k|to_v|to_out\.0)",
        r"ff\.linear_(in|out)",
    )
    attention_layouts = ()
    excluded = {
        "modulation": "its blocks share their modulation layers, which hold 3% of the weights",
        "norm_rope": "it computes them in fp32 from queries and keys, where the function rounds",
    }

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        tokenizer = load_tokenizer(folder)
        chats = latents.as_chats(tokenizer, captions)
        lengths = [len(ids) for ids in tokenizer(chats)["input_ids"]]
        return [min(-(-n // PAD_MULTIPLE_3) * PAD_MULTIPLE_3, MAX_TEXT_TOKENS_3) for n in lengths]

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        prompts = [batch[f"prompt_embeds_{number}"] for number in range(len(noisy))]
        if len({len(prompt) for prompt in prompts}) > 1:  # more padding would be seen
            rows = zip(noisy[:, None], levels[:, None], prompts, strict=True)
            return torch.cat(
                [
                    self.predict(transformer, one, level, {"prompt_embeds_0": prompt})
                    for one, level, prompt in rows
                ]
            )
        # A position is (time, row, column, place in the text).
        sides = (torch.arange(side) * IMAGE_SCALE_3 for side in noisy.shape[3:])
        zero, places = torch.zeros(1), torch.arange(float(len(prompts[0])))
        velocity: Tensor = transformer(
            hidden_states=noisy.flatten(2).mT,
            encoder_hidden_states=torch.stack(prompts),
            timestep=levels,
            img_ids=send(torch.cartesian_prod(zero, *sides, zero), noisy.device),
            txt_ids=send(torch.cartesian_prod(zero, zero, zero, places), noisy.device),
            return_dict=False,
        )[0]
        return velocity.mT.reshape(noisy.shape)
