"""Stable Diffusion XL: a UNet that learns noise on a discrete schedule. Pony, Illustrious and
NoobAI are such models.

Its blocks are the transformer layers of each stage and the residual ones around them, in the order
that they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.models.family import (
    Batch,
    Config,
    Defaults,
    Family,
    Parts,
    PublishedModel,
    Sample,
    Shapes,
    Sizes,
)
from autotune.models.latents import VAE_FACTOR, ImageLatents
from autotune.models.noise import DiscreteDiffusion, NoiseProcess
from autotune.plan.workload import Bucket
from autotune.system.process import lazy_module

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    nn = lazy_module("torch.nn")

TEXT_TOKENS = 77
"""Length that CLIP's tokenizer pads every prompt to, without a mask."""

BLOCK = r".*\.transformer_blocks\.\d+"
ATTENTION = r"attn[12]\.(to_q|to_k|to_v|to_out\.0)"
MLP = r"ff\.net\.(0\.proj|2)"
PROJECTIONS = r".*\.attentions\.\d+\.proj_(in|out)"
TIME = r"(?!mid_block\.resnets\.0).*\.resnets\.\d+\.time_emb_proj"

UNET: Config = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
}
DIRECT = "its attention calls PyTorch's directly, whatever backend is set"


class StableDiffusionXL(ImageLatents, Family):
    """Text to image; the model's own scheduler says whether it predicts the noise or v."""

    name = "sdxl"
    models = (
        PublishedModel(
            "stabilityai/stable-diffusion-xl-base-1.0",
            UNET,
            Parts((123_060_480, 694_659_840), "AutoencoderKL", VAE),
            num_parameters=2_567_463_684,
            license="openrail++",
        ),
    )
    pipeline_class = "StableDiffusionXLPipeline"
    denoiser = "unet"
    transformer_class = "UNet2DConditionModel"
    noise = DiscreteDiffusion()
    components = (
        "unet",
        "vae",
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "scheduler",
    )
    tiny_config: ClassVar[Config] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (32, 128),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1),
        "attention_head_dim": (1, 2),  # of 64, as published
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=TEXT_TOKENS,
        timestep_sampling="uniform",
        preview_steps=30,
        sampling_guidance=5.0,
        sources={
            "learning_rate": "diffusers' script",
            "sampling_guidance": "the pipeline's default",
        },
    )
    size_multiple_px = 4 * VAE_FACTOR  # its two stages below the first halve the sides
    max_text_tokens = TEXT_TOKENS
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.{ATTENTION}",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        # what Kohya's LoRA adapts
        "attention+mlp+proj": rf"{BLOCK}\.({ATTENTION}|{MLP})|{PROJECTIONS}",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP})|{TIME}",
    }
    block_lists = ()
    excluded = MappingProxyType(
        {
            "attention": DIRECT,
            "compile": "its blocks have too many shapes: torch would compile each separately",
            "modulation": "a UNet has no modulation layers",
            "norm_rope": "its attention neither norms nor rotates queries and keys",
        }
    )

    def noise_of(self, scheduler: Config, index: Config) -> NoiseProcess:
        return DiscreteDiffusion.from_scheduler(scheduler)

    def find_block_lists(self, transformer: nn.Module) -> dict[str, list[nn.Module]]:
        unet: Any = transformer
        stages = {
            **{f"down_blocks.{number}": stage for number, stage in enumerate(unet.down_blocks)},
            "mid_block": unet.mid_block,
            **{f"up_blocks.{number}": stage for number, stage in enumerate(unet.up_blocks)},
        }
        found: dict[str, list[nn.Module]] = {}
        for name, stage in stages.items():
            for number, resnet in enumerate(stage.resnets):
                if (name, number) != ("mid_block", 0):  # which diffusers never checkpoints
                    found[f"{name}.resnets.{number}"] = [resnet]
                for layers in getattr(stage, "attentions", ())[number : number + 1]:
                    found[f"{name}.attentions.{number}.transformer_blocks"] = list(
                        layers.transformer_blocks
                    )
        return found

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        pooled = (
            config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        )
        return {
            "latents": (
                config.get("in_channels", 4),
                1,
                bucket.height_px // VAE_FACTOR,
                bucket.width_px // VAE_FACTOR,
            ),
            "prompt_embeds": (text_tokens, config["cross_attention_dim"]),
            "pooled_prompt_embeds": (pooled,),
        }

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        prompt, _, pooled, _ = pipeline.encode_prompt(
            prompt=caption, do_classifier_free_guidance=False
        )
        return {"prompt_embeds": prompt[0], "pooled_prompt_embeds": pooled[0]}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        return [TEXT_TOKENS] * len(captions)

    def predict(
        self, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
    ) -> Tensor:
        height, width = noisy.shape[3] * VAE_FACTOR, noisy.shape[4] * VAE_FACTOR
        # Original size, corner and size of the crop: images count as uncropped, as the pipeline
        # samples them.
        sizes = noisy.new_tensor((height, width, 0, 0, height, width)).expand(len(noisy), 6)
        prediction: Tensor = transformer(
            noisy[:, :, 0],
            levels,
            encoder_hidden_states=batch["prompt_embeds"],
            added_cond_kwargs={"text_embeds": batch["pooled_prompt_embeds"], "time_ids": sizes},
            return_dict=False,
        )[0]
        return prediction[:, :, None]
