"""Chroma: FLUX.1's blocks without modulation layers, T5 alone as its text encoder, and
classifier-free guidance.

A small network, which is not adapted, makes the modulation of all blocks. Of a prompt's padding one
token is seen.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from autotune.families.base import (
    ATTENTION,
    FLUX_VAE,
    Batch,
    Config,
    Defaults,
    Parts,
    PublishedModel,
    Sample,
    Shapes,
    Sizes,
    count_tokens,
)
from autotune.families.flux1_dev import BLOCK, MLP, TEXT_TOKENS, Flux1Dev
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

PARTS = Parts((4_762_310_656,), "AutoencoderKL", FLUX_VAE)
SOURCE = (
    "chroma_params in src/models/chroma/model.py of lodestone-rock/flow@27991a4; 8.9 billion "
    "by "
    "its card"
)


HD = PublishedModel(
    "lodestones/Chroma1-HD",
    {},
    PARTS,
    num_parameters=8_899_983_424,
    license="apache-2.0",
    source=SOURCE,
)
BASE_NOTE = "trained at 512 px (--resolution 512); chroma at 1,024"


class Chroma(Flux1Dev):
    """Text to image. Prompts are encoded at their own length: padding is masked and takes no
    position.
    """

    name = "chroma"
    models = (
        HD,
        HD.variant("lodestones/Chroma1-Base", "chroma-base", note=BASE_NOTE, source=SOURCE),
    )
    pipeline_class = "ChromaPipeline"
    transformer_class = "ChromaTransformer2DModel"
    obsolete_config = frozenset({"guidance_embeds", "pooled_projection_dim"})  # FLUX.1's, unused
    components = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    tiny_config: ClassVar[Config] = {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "approximator_hidden_dim": 64,
    }
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=256,
        timestep_shift=3.0,
        preview_steps=40,
        sampling_guidance=3.0,
        sources={
            "timestep_shift": "its scheduler's",
            "preview_steps": "diffusers' example",
            "sampling_guidance": "diffusers' example",
        },
    )
    masks_padding = True
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.({ATTENTION})",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        # the modulation is made outside of the blocks
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP})",
    }
    modulation = None
    excluded = MappingProxyType(
        {
            "modulation": (
                "one network makes the modulation of all its blocks, and holds 3% of the weights"
            )
        }
    )

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        shapes = super().sample_shapes(config, bucket, text_tokens)
        return {name: shapes[name] for name in ("latents", "prompt_embeds")}

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence["Tensor"] = ()
    ) -> Sample:
        prompt, _, mask, *_ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
        return {"prompt_embeds": prompt[0][mask[0] > 0]}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        return [min(length + 1, TEXT_TOKENS) for length in count_tokens(folder, captions)]

    def conditioning(
        self, transformer: "nn.Module", levels: "Tensor", batch: Batch, num_image_tokens: int
    ) -> dict[str, Any]:
        from torch.nn.functional import pad

        mask = batch.get("prompt_mask")
        return {
            "attention_mask": None if mask is None else pad(mask, (0, num_image_tokens), value=True)
        }

    def sample(
        self, pipeline: Any, prompt: str, bucket: Bucket, **options: Any
    ) -> list["Image.Image"]:
        # The pipeline adds its mask to what it should mask (huggingface/diffusers#13619): no
        # padding, no mask.
        with mock.patch.object(pipeline, "_prepare_attention_mask", return_value=None):
            return super().sample(pipeline, prompt, bucket, **options)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        wanted, _, mask, unwanted, _, unwanted_mask = pipeline.encode_prompt(prompt)
        own, unwanted_own = mask[0] > 0, unwanted_mask[0] > 0
        return {
            "guidance_scale": self.defaults.sampling_guidance,
            "prompt_embeds": wanted[:, own],
            "prompt_attention_mask": mask[:, own],
            "negative_prompt_embeds": unwanted[:, unwanted_own],
            "negative_prompt_attention_mask": unwanted_mask[:, unwanted_own],
        }
