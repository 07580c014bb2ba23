"""Wan 2.1 and Wan 2.2, text to video: blocks that attend to UMT5's text. Images train them, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.errors import InvalidInput
from autotune.models.facts import Config, Defaults, Parts, PublishedModel
from autotune.models.family import Batch, Family, Images, Options
from autotune.models.latents import adapted_layers
from autotune.models.noise import FlowMatching, NoiseProcess
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor

TEXT_TOKENS = 512  # of every prompt: the transformer attends to the zeros of padding
POSITIONS = 1024  # maximum rows, columns and latent frames of the transformer's rotary embedding
BOUNDARY = 0.875  # share of noise from which one transformer of Wan 2.2 14B denoises
UMT5 = (5_680_910_336,)  # parameters of UMT5-XXL's encoder
PARTS = Parts(UMT5, "AutoencoderKLWan")
VAE_22: Config = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": (
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542,
        0.2813, 0.0891, 0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109,
        0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899,
        -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
    "latents_std": (
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894,
        1.0901, 0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146,
        0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709,
        0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537,
        0.5444, 0.4089, 0.7468, 0.7744,
    ),
}  # fmt: skip


class Wan(Family):
    """Latents are those of a causal video autoencoder, standardized by channel."""

    pipeline_class = "WanPipeline"
    transformer_class = "WanTransformer3DModel"
    tiny_config = {"num_layers": 2, "num_attention_heads": 2, "ffn_dim": 128, "text_dim": 64}
    prompt_size = (("text_dim", 4096),)
    encode_options = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT_TOKENS}
    max_text_tokens = TEXT_TOKENS
    frames_per_latent = 4
    max_frames = 4 * (POSITIONS - 1) + 1
    casts_to_weight_dtype = True
    target_sets = adapted_layers(
        r"blocks\.\d+", r"attn[12]\.(to_q|to_k|to_v|to_out\.0)", r"ffn\.net\.(0\.proj|2)"
    )
    block_lists = ("blocks",)
    excluded = {
        "modulation": "a block's modulation is a table, of next to no weights",
        "norm_rope": "its norms span all heads of a projection",
    }

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        # The pipeline of Wan 2.2 gives each token a timestep, but here the same for all.
        text = batch["prompt_embeds"]
        velocity: Tensor = transformer(noisy, levels * 1000, text, return_dict=False)[0]
        return velocity


class Wan21(Wan):
    """Wan 2.1, of 1.3B and 14B parameters, at 480p."""

    name = "wan-2.1"
    aliases = {"wan-2.1-1.3b": "wan-2.1"}
    models = (
        PublishedModel(
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            "wan-2.1",
            {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
            PARTS,
            num_parameters=1_418_996_800,
            license="apache-2.0",
            source="wan/configs/wan_t2v_1_3B.py in Wan-Video/Wan2.1@9737cba",
        ),
        PublishedModel(
            "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            "wan-2.1-14b",
            {},
            PARTS,
            num_parameters=14_288_491_584,
            license="apache-2.0",
            source="wan/configs/wan_t2v_14B.py in Wan-Video/Wan2.1@9737cba; 28.6 GB in bf16",
        ),
    )
    pipeline_config = {"expand_timesteps": None, "boundary_ratio": None}
    defaults = Defaults(
        effective_batch_size=1,
        resolution_px=640,
        text_tokens=TEXT_TOKENS,
        timestep_shift=3.0,
        preview_steps=30,
        sampling_guidance=5.0,
        frames_per_second=16.0,
        num_frames=81,  # five seconds at 16 frames per second, and the first frame
        sources={
            "timestep_shift": "diffusers' example for 480p",
            "sampling_guidance": "the pipeline's default",
        },
    )


class Wan22(Wan):
    """Wan 2.2 of 5B parameters, at 720p: its autoencoder has twice the factor along each side."""

    name = "wan-2.2"
    aliases = {"wan-2.2-5b": "wan-2.2"}
    models = (
        PublishedModel(
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            "wan-2.2",
            {
                "num_attention_heads": 24,
                "ffn_dim": 14336,
                "num_layers": 30,
                "in_channels": 48,
                "out_channels": 48,
            },
            Parts(UMT5, "AutoencoderKLWan", VAE_22),
            num_parameters=4_999_787_712,
            license="apache-2.0",
            source="wan/configs/wan_ti2v_5B.py in Wan-Video/Wan2.2@42bf4cf",
            note="trained here from text to clips or images, without a start image",
        ),
    )
    pipeline_config = {"expand_timesteps": True, "boundary_ratio": None}
    latent_px = 16
    size_multiple_px = 32
    defaults = Defaults(
        effective_batch_size=1,
        resolution_px=960,
        text_tokens=TEXT_TOKENS,
        timestep_shift=5.0,
        preview_steps=30,
        sampling_guidance=5.0,
        num_frames=121,  # five seconds at 24 frames per second, and the first frame
        sources={
            "timestep_shift": "the configuration in Wan-Video/Wan2.2",
            "sampling_guidance": "the same",
        },
    )


class Wan22HighNoise(Wan):
    """Wan 2.2 of 14B parameters, at 480p: the transformer for much noise."""

    name = "wan-2.2-14b"
    aliases = {"wan-2.2-a14b": "wan-2.2-14b"}
    expert = "high-noise"
    other_denoisers = ("transformer_2",)
    components = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")
    models = (
        PublishedModel(
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            "wan-2.2-14b",
            {},
            PARTS,
            num_parameters=14_288_491_584,
            license="apache-2.0",
            source="wan/configs/wan_t2v_A14B.py in Wan-Video/Wan2.2@42bf4cf; 28.6 GB in fp16 each",
            note=(
                "two transformers of this size: a run trains one of them, --expert high-noise "
                "(default) or low-noise"
            ),
        ),
    )
    pipeline_config = {"expand_timesteps": None, "boundary_ratio": BOUNDARY}
    noise = FlowMatching(lowest_share=BOUNDARY)
    defaults = replace(
        Wan21.defaults,
        timestep_shift=12.0,
        sampling_guidance=4.0,
        sources={
            "timestep_shift": "the configuration in Wan-Video/Wan2.2",
            "sampling_guidance": "the same",
        },
    )

    def is_pipeline(self, index: Config) -> bool:
        boundary = index.get("boundary_ratio") and BOUNDARY
        return super().is_pipeline({**index, "boundary_ratio": boundary})

    def noise_of(self, scheduler: Config, index: Config) -> NoiseProcess:
        boundary = index.get("boundary_ratio")
        if not isinstance(boundary, float) or not 0 < boundary < 1:
            hint = "it is a share of noise, as 0.875: download the model again"
            raise InvalidInput(f"model_index.json has the boundary_ratio {boundary!r}", hint=hint)
        return self._noise_beside(boundary)

    def _noise_beside(self, boundary: float) -> NoiseProcess:
        return FlowMatching(lowest_share=boundary)

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        usual = super().call_options(pipeline, prompt, bucket, controls)
        usual["guidance_scale_2"] = 0.75 * usual["guidance_scale"]  # 3 and 4 in Wan-Video/Wan2.2
        return usual


class Wan22LowNoise(Wan22HighNoise):
    """The transformer for little noise."""

    expert = "low-noise"
    denoiser = "transformer_2"
    other_denoisers = ("transformer",)
    adapter_options = {"load_into_transformer_2": True}
    noise = FlowMatching(highest_share=BOUNDARY)

    @property
    def adapter_component(self) -> str:
        return "transformer"  # diffusers names the layers of both like the first's

    def _noise_beside(self, boundary: float) -> NoiseProcess:
        return FlowMatching(highest_share=boundary)


Wan22HighNoise.experts = {"high-noise": Wan22HighNoise(), "low-noise": Wan22LowNoise()}
