"""Wan 2.1 and 2.2, text to video, and image to video: blocks that attend to UMT5's text. Images
train those from text, too."""

from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.models.facts import Config, family_facts
from autotune.models.family import Batch, Family, Images, Options, Sample, Shapes
from autotune.models.latents import adapted_layers
from autotune.models.noise import FlowMatching, NoiseProcess
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, torch

TEXT_TOKENS = 512  # of every prompt: the transformer attends to the zeros of padding
POSITIONS = 1024  # maximum rows, columns and latent frames of the transformer's rotary embedding
BOUNDARY = 0.875  # share of noise from which one transformer of Wan 2.2 14B denoises
IMAGE_BOUNDARY = 0.9  # so of its image to video
START = "start_latents"


class Wan(Family):
    """Latents are those of a causal video autoencoder, standardized by channel."""

    pipeline_class = "WanPipeline"
    transformer_class = "WanTransformer3DModel"
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
    models, defaults, tiny_config = family_facts(name)
    aliases = {"wan-2.1-1.3b": "wan-2.1"}
    pipeline_config = {"expand_timesteps": None, "boundary_ratio": None}


class Wan22(Wan):
    """Wan 2.2 of 5B parameters, at 720p: its autoencoder has twice the factor along each side."""

    name = "wan-2.2"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"wan-2.2-5b": "wan-2.2"}
    pipeline_config = {"expand_timesteps": True, "boundary_ratio": None}
    latent_px = 16
    size_multiple_px = 32


class Wan22HighNoise(Wan):
    """Wan 2.2 of 14B parameters, at 480p: the transformer for much noise."""

    name = "wan-2.2-14b"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"wan-2.2-a14b": "wan-2.2-14b"}
    expert = "high-noise"
    other_denoisers = ("transformer_2",)
    components = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")
    pipeline_config = {"expand_timesteps": None, "boundary_ratio": BOUNDARY}
    noise = FlowMatching(lowest_share=BOUNDARY)

    def is_pipeline(self, index: Config) -> bool:
        boundary = index.get("boundary_ratio") and BOUNDARY
        return super().is_pipeline({**index, "boundary_ratio": boundary})

    def noise_of(self, scheduler: Config, index: Config) -> NoiseProcess:
        boundary = index.get("boundary_ratio")
        if not isinstance(boundary, float) or not 0 < boundary < 1:
            hint = "it must be a share of noise such as 0.875: download the model again"
            raise InvalidInput(f"model_index.json has the boundary_ratio {boundary!r}", hint=hint)
        end = "lowest_share" if self.expert == "high-noise" else "highest_share"
        return FlowMatching(**{end: boundary})

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


class Wan22ImageHighNoise(Wan22HighNoise):
    """Image to video of 14B parameters. 20 channels more hold a mask and the latents of the first
    frame, followed by zeros; in training it is the clip's own."""

    name = "wan-2.2-i2v"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"wan-2.2-i2v-a14b": "wan-2.2-i2v", "wan-2.2-i2v-14b": "wan-2.2-i2v"}
    pipeline_class = "WanImageToVideoPipeline"
    latent_channels = ("out_channels", 16)
    starts_from_picture = True
    noise = FlowMatching(lowest_share=IMAGE_BOUNDARY)

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

        pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean  # its own fails without ftfy
        return super().load_pipeline(folder, **components)

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        shapes = super().sample_shapes(config, bucket, text_tokens, num_controls)
        return {**shapes, START: shapes["latents"]}

    def encode_item(self, pipeline: Any, pixels: Tensor) -> Sample:
        still = torch.cat([pixels[:, :1], torch.zeros_like(pixels[:, 1:])], dim=1)
        start = self.encode_pixels(pipeline, still)
        return {**super().encode_item(pipeline, pixels), START: start}

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        mask = torch.zeros_like(noisy[:, : self.frames_per_latent])
        mask[:, :, 0] = 1
        known = torch.cat([noisy, mask, batch[START].to(noisy.dtype)], dim=1)
        return super().predict(transformer, known, levels, batch)

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        usual = super().call_options(pipeline, prompt, bucket, controls)
        guidance = usual["guidance_scale"]
        return {**usual, "image": controls[0], "guidance_scale_2": guidance}


class Wan22ImageLowNoise(Wan22ImageHighNoise, Wan22LowNoise):
    """The transformer for little noise."""

    noise = FlowMatching(highest_share=IMAGE_BOUNDARY)


Wan22HighNoise.experts = {"high-noise": Wan22HighNoise(), "low-noise": Wan22LowNoise()}
Wan22ImageHighNoise.experts = {
    "high-noise": Wan22ImageHighNoise(),
    "low-noise": Wan22ImageLowNoise(),
}
