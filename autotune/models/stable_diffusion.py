"""Stable Diffusion 3.5: joint blocks of text and image, two CLIPs and T5. Of medium, the first 13
blocks attend a second time, among the image's tokens alone.

Stable Diffusion XL: a UNet on a discrete schedule, as of Pony, Illustrious and NoobAI. Its blocks
are the transformer layers of each stage and the residual ones around them.
"""

from __future__ import annotations

from typing import Any

from autotune.models.facts import Config, ModulationLayers, family_facts
from autotune.models.family import COMPONENTS, Batch, Family, Shapes
from autotune.models.latents import ATTENTION, ImageLatents, adapted_layers, send
from autotune.models.noise import DiscreteDiffusion, NoiseProcess
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, nn, torch

CLIP_TOKENS = 77  # to which every prompt is padded, without a mask
T5_TOKENS = 256  # after those of both CLIPs, which stand side by side
JOINT = r"transformer_blocks\.\d+"
XL_BLOCK = r".*\.transformer_blocks\.\d+"
XL_ATTENTION = r"attn[12]\.(to_q|to_k|to_v|to_out\.0)"
XL_MLP = r"ff\.net\.(0\.proj|2)"
PROJECTIONS = r".*\.attentions\.\d+\.proj_(in|out)"
TIME = r"(?!mid_block\.resnets\.0).*\.resnets\.\d+\.time_emb_proj"


class StableDiffusion35(ImageLatents, Family):
    """Text to image. Prompts always have the same length."""

    name = "sd3.5"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"sd3.5-large": "sd3.5", "stable-diffusion-3.5": "sd3.5"}
    pipeline_class = "StableDiffusion3Pipeline"
    transformer_class = "SD3Transformer2DModel"
    components = (*COMPONENTS, "text_encoder_2", "text_encoder_3", "tokenizer_2", "tokenizer_3")
    casts_to_weight_dtype = True
    max_side_px = 192 * 16  # of large: medium's table of positions is twice as wide
    pooled_size = ("pooled_projection_dim", 2048)
    pooled_output = 2
    encode_options = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    max_text_tokens = CLIP_TOKENS + T5_TOKENS
    caption_tokenizer, max_caption_tokens = "tokenizer_3", T5_TOKENS
    target_sets = adapted_layers(
        JOINT,
        rf"{ATTENTION}|attn2\.(to_q|to_k|to_v|to_out\.0)",
        r"ff(_context)?\.net\.(0\.proj|2)",
        r"norm1(_context)?\.linear",
    )
    modulation = ModulationLayers(
        rf"{JOINT}\.norm1(_context)?|norm_out", ("time_text_embed",), ("pooled_prompt_embeds",)
    )
    excluded = {
        "attention": "its attention calls PyTorch's directly, whatever backend is set",
        "norm_rope": "it does not rotate queries and keys: positions are added to the patches",
    }

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        text = batch["prompt_embeds"], batch["pooled_prompt_embeds"]
        velocity: Tensor = transformer(noisy[:, :, 0], *text, 1000 * levels, return_dict=False)[0]
        return velocity[:, :, None]


class StableDiffusionXL(ImageLatents, Family):
    """Text to image; the model's own scheduler says whether it predicts the noise or v."""

    name = "sdxl"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"sdxl-base": "sdxl", "stable-diffusion-xl": "sdxl"}
    fine_tunes = (
        *("pony diffusion v6 xl", "illustrious xl", "noob ai xl", "animagine xl 4", "sdxl turbo"),
        *("juggernaut xl", "real vis xl", "dream shaper xl", "sdxl lightning"),
    )
    pipeline_class = "StableDiffusionXLPipeline"
    denoiser = "unet"
    transformer_class = "UNet2DConditionModel"
    noise = DiscreteDiffusion()
    components = ("unet", *COMPONENTS[1:], "text_encoder_2", "tokenizer_2")
    size_multiple_px = 32  # its two stages below the first halve the sides
    latent_channels = ("in_channels", 4)
    prompt_size = (("cross_attention_dim", 1280),)
    pooled_size = ("projection_class_embeddings_input_dim", 0)
    pooled_output = 2
    encode_options = {"do_classifier_free_guidance": False}
    max_text_tokens = CLIP_TOKENS
    target_sets = {
        "attention": rf"{XL_BLOCK}\.{XL_ATTENTION}",
        "attention+mlp": rf"{XL_BLOCK}\.({XL_ATTENTION}|{XL_MLP})",
        # what Kohya's LoRA adapts
        "attention+mlp+proj": rf"{XL_BLOCK}\.({XL_ATTENTION}|{XL_MLP})|{PROJECTIONS}",
        "all-linear": rf"{XL_BLOCK}\.({XL_ATTENTION}|{XL_MLP})|{TIME}",
    }
    block_lists = ()
    excluded = {
        "attention": "its attention calls PyTorch's directly, whatever backend is set",
        "compile": "its blocks have too many shapes: torch would compile each separately",
        "modulation": "a UNet has no modulation layers",
        "norm_rope": "its attention neither norms nor rotates queries and keys",
    }

    def noise_of(self, scheduler: Config, index: Config) -> NoiseProcess:
        return DiscreteDiffusion.from_scheduler(scheduler)

    def find_block_lists(self, transformer: Any) -> dict[str, list[nn.Module]]:
        stages = {
            **{f"down_blocks.{n}": stage for n, stage in enumerate(transformer.down_blocks)},
            "mid_block": transformer.mid_block,
            **{f"up_blocks.{n}": stage for n, stage in enumerate(transformer.up_blocks)},
        }
        found: dict[str, list[nn.Module]] = {}
        for name, stage in stages.items():
            for number, resnet in enumerate(stage.resnets):
                if (name, number) != ("mid_block", 0):  # which diffusers never checkpoints
                    found[f"{name}.resnets.{number}"] = [resnet]
                for layers in getattr(stage, "attentions", ())[number : number + 1]:
                    blocks = list(layers.transformer_blocks)
                    found[f"{name}.attentions.{number}.transformer_blocks"] = blocks
        return found

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        shapes = super().sample_shapes(config, bucket, text_tokens, num_controls)
        (with_sizes,) = shapes["pooled_prompt_embeds"]  # six numbers beside the pooled prompt
        pooled = with_sizes - 6 * config["addition_time_embed_dim"]
        return {**shapes, "pooled_prompt_embeds": (pooled,)}

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        height, width = noisy.shape[3] * self.latent_px, noisy.shape[4] * self.latent_px
        # Original size, corner and size of the crop: as the pipeline samples them.
        numbers = torch.tensor((height, width, 0, 0, height, width), dtype=noisy.dtype)
        sizes = send(numbers, noisy.device).expand(len(noisy), 6)
        added = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": sizes}
        given = noisy[:, :, 0], levels, batch["prompt_embeds"]
        prediction: Tensor = transformer(*given, added_cond_kwargs=added, return_dict=False)[0]
        return prediction[:, :, None]
