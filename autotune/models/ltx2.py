"""LTX-2.3 and LTX-2: a stream of video and one of sound that hear each other, Gemma 3 and
connectors for the text.

Trained here on clips without sound and on images, as the authors' trainer does without a folder of
sound: the video's stream alone, which then attends to itself and to the text (`training_strategies`
of Lightricks/LTX-2@400fd31).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from PIL import Image

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
    unwrap_model,
)
from autotune.plan.workload import Bucket
from autotune.system.process import lazy_module

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    nn = lazy_module("torch.nn")

TEXT_TOKENS = 1024
"""Length of every prompt: the connectors put learned tokens in the place of the padding, so that
there is no mask."""
LATENT_PX = 32
FIRST: Config = {"rope_type": "split"}
LATER: Config = {
    **{"rope_type": "split", "use_prompt_embeddings": False, "perturbed_attn": True},
    **dict.fromkeys(
        ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True
    ),
}
GEMMA, VAE_CLASS = 12_187_325_040, "AutoencoderKLLTX2Video"
AUDIO_VAE = 53_248_146
"""Number of its parameters, as of the vocoders beside it: what diffusers' classes have by
default."""
VAE: Mapping[str, Any] = {
    "decoder_causal": False,
    "spatial_compression_ratio": LATENT_PX,
    "temporal_compression_ratio": 8,
}
LATER_VAE: Mapping[str, Any] = {
    **VAE,
    "block_out_channels": (256, 512, 1024, 1024),
    "decoder_block_out_channels": (256, 512, 512, 1024),
    "layers_per_block": (4, 6, 4, 2, 2),
    "decoder_layers_per_block": (4, 6, 4, 2, 2),
    "decoder_spatio_temporal_scaling": (True,) * 4,
    "decoder_inject_noise": (False,) * 5,
    "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    "upsample_residual": (False,) * 4,
    "upsample_factor": (2, 2, 1, 2),
    "decoder_spatial_padding_mode": "zeros",
}
LICENSE, NOTE = (
    "ltx-2-community-license-agreement",
    "trained here from text to silent clips or images",
)
SOURCE = (
    "ltx_2_3/pytorch/loader.py of tenstorrent/tt-forge-models@3154030: 19 billion; 22 with "
    "the "
    "connectors"
)
BLOCK = r"transformer_blocks\.\d+"
ATTENTION = r"attn[12]\.(to_q|to_k|to_v|to_out\.0)"
MLP = r"ff\.net\.(0\.proj|2)"


class LTX2(Family):
    """Latents are those of a causal video autoencoder, standardized by channel; one is one
    token."""

    name = "ltx-2.3"
    models = (
        PublishedModel(
            "diffusers/LTX-2.3-Diffusers",
            LATER,
            Parts((GEMMA, 3_172_227_584), VAE_CLASS, LATER_VAE, AUDIO_VAE + 128_537_448),
            num_parameters=18_988_838_144,
            license=LICENSE,
            source=SOURCE,
            note=NOTE,
        ),
        PublishedModel(
            "Lightricks/LTX-2",
            FIRST,
            Parts((GEMMA, 1_431_475_200), VAE_CLASS, VAE, AUDIO_VAE + 55_592_802),
            name="ltx-2",
            num_parameters=18_876_174_592,
            license=LICENSE,
            note=NOTE,
        ),
    )
    pipeline_class = "LTX2Pipeline"
    transformer_class = "LTX2VideoTransformer3DModel"
    components = (
        *(
            "transformer",
            "vae",
            "audio_vae",
            "vocoder",
            "text_encoder",
            "connectors",
            "tokenizer",
            "scheduler",
        ),
    )
    connectors = ("connectors",)
    decoders = ("vae", "audio_vae", "vocoder")
    tiny_config: ClassVar[Config] = {
        "num_layers": 2,
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 128,
            "cross_attention_dim": 256,
            "caption_channels": 64,
        },
        **{
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 64,
            "audio_cross_attention_dim": 128,
        },
    }
    defaults = Defaults(
        learning_rate=1e-4,
        effective_batch_size=1,
        resolution_px=768,
        text_tokens=TEXT_TOKENS,
        timestep_shift=7.8,
        preview_steps=30,
        sampling_guidance=3.0,
        preview_calls=4,
        num_frames=121,
        shift_by_tokens=((1024, 0.95), (4096, 2.05)),
        sources={
            "learning_rate": "the authors' trainer",
            "timestep_shift": "the authors' trainer, at 4,096 tokens",
            "sampling_guidance": "the pipeline's default",
        },
    )
    size_multiple_px = LATENT_PX
    patch = 1
    max_text_tokens = TEXT_TOKENS
    max_side_px = 2048
    frames_per_latent = 8
    max_frames = 481  # 20 seconds: as sides, what positions are a share of
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.{ATTENTION}",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        # of the video's stream
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|attn[12]\.to_gate_logits)",
    }
    block_lists = ("transformer_blocks",)
    excluded = MappingProxyType(
        {
            "modulation": "its blocks share their modulation layers, which hold 2% of the weights",
            "norm_rope": "its norms span all heads of a projection",
        }
    )

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        return _connect(super().load_pipeline(folder, **components))

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        is_first = config.get("use_prompt_embeddings", True)
        width = (
            config.get("caption_channels", 3840)
            if is_first
            else config.get("cross_attention_dim", 4096)
        )
        size = (bucket.height_px // LATENT_PX, bucket.width_px // LATENT_PX)
        frames = self.num_latent_frames(bucket.num_frames)
        return {
            "latents": (config.get("in_channels", 128), frames, *size),
            "prompt_embeds": (text_tokens, width),
        }

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        return {
            "prompt_embeds": pipeline.encode_prompt(caption, do_classifier_free_guidance=False)[0][
                0
            ]
        }

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        return [TEXT_TOKENS] * len(captions)

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        latents: Tensor = (
            vae.encode(pixels[None].to(vae.dtype)).latent_dist.mode()[0].to(pixels.dtype)
        )
        mean, std = (
            table.to(latents).view(-1, 1, 1, 1) for table in (vae.latents_mean, vae.latents_std)
        )
        latents = (latents - mean) * float(vae.config.scaling_factor) / std
        return latents

    def predict(
        self, transformer: nn.Module, noisy: Tensor, levels: Tensor, batch: Batch
    ) -> Tensor:
        size, _, frames, height, width = noisy.shape
        config, timestep = unwrap_model(transformer).config, levels * 1000
        # Where the streams do not hear each other the sound's has no part in the video: one token,
        # and a word.
        text = (
            config.caption_channels
            if config.use_prompt_embeddings
            else config.audio_cross_attention_dim
        )
        velocity: Tensor = transformer(
            hidden_states=noisy.flatten(2).mT,
            audio_hidden_states=noisy.new_zeros(size, 1, config.audio_in_channels),
            encoder_hidden_states=batch["prompt_embeds"],
            audio_encoder_hidden_states=noisy.new_zeros(size, 1, text),
            timestep=timestep,
            sigma=timestep,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.defaults.frames_per_second,
            audio_num_frames=1,
            isolate_modalities=True,
            return_dict=False,
        )[0]
        return velocity.mT.reshape(noisy.shape)

    def sample(
        self, pipeline: Any, prompt: str, bucket: Bucket, **options: Any
    ) -> list[Image.Image]:
        # The pipeline's mask of the text masks nothing, and some attention backends take none.
        handle = unwrap_model(pipeline.transformer).register_forward_pre_hook(
            _without_masks, with_kwargs=True
        )
        try:
            return super().sample(pipeline, prompt, bucket, **options)
        finally:
            handle.remove()

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence[Image.Image]
    ) -> dict[str, Any]:
        usual = super().sampling_arguments(pipeline, prompt, bucket, controls)
        usual |= {"num_frames": bucket.num_frames, "frame_rate": self.defaults.frames_per_second}
        is_first = unwrap_model(pipeline.transformer).config.use_prompt_embeddings
        first = {"use_cross_timestep": False, "spatio_temporal_guidance_blocks": [29]}
        return usual | first if is_first else usual


def _without_masks(
    _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return args, {**options, "encoder_attention_mask": None, "audio_encoder_attention_mask": None}


class _Passed:
    """In the place of a pipeline's connectors, for prompts that have been through them."""

    def __init__(self, connectors: Any) -> None:
        self.connectors = connectors

    def __call__(self, video: Tensor, audio: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return video, audio, video.new_ones(video.shape[:2])


def _connect(pipeline: Any) -> Any:
    """Let `encode_prompt` return what the connectors make of a prompt, for video and for sound
    in place of its mask: a thirtieth of what they take, and what is left to do needs neither
    them nor Gemma."""
    from diffusers.models.attention_dispatch import attention_backend

    stock = pipeline.encode_prompt

    def encode_prompt(*args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        prompts, mask, negative, negative_mask = stock(*args, **options)
        connectors, side = pipeline.connectors.connectors, pipeline.tokenizer.padding_side
        with attention_backend(
            "native"
        ):  # a transformer's backend holds for all, and these always have a mask
            connected = connectors(prompts, mask, padding_side=side)[:2]
            return *connected, *(
                (None, None) if negative is None else connectors(negative, negative_mask, side)[:2]
            )

    pipeline.encode_prompt, pipeline.connectors = encode_prompt, _Passed(pipeline.connectors)
    return pipeline
