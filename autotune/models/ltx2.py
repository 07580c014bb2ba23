"""LTX-2.5, 2.3 and 2: streams of video and of sound, Gemma and connectors for the text.

Trained here on clips without sound and on images: the video's stream alone, as the authors' trainer
does without sound (`training_strategies` of Lightricks/LTX-2@400fd31).
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from autotune.models.facts import Config, family_facts
from autotune.models.family import COMPONENTS, Batch, Family, Images, Options, Shapes, unwrap_model
from autotune.models.latents import adapted_layers, send
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, nn

TEXT_TOKENS = 1024  # of every prompt: connectors put learned tokens in the place of padding


class LTX2(Family):
    """Latents of a causal video autoencoder, standardized by channel; one is one token."""

    name = "ltx-2.3"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"ltx": "ltx-2.3"}
    pipeline_class = "LTX2Pipeline"
    transformer_class = "LTX2VideoTransformer3DModel"
    components = (*COMPONENTS, "audio_vae", "vocoder", "connectors")
    connectors = ("connectors",)
    decoders = ("vae", "audio_vae", "vocoder")
    latent_px = 32
    patch = 1
    size_multiple_px = 32
    latent_channels = ("in_channels", 128)
    encode_options = {"do_classifier_free_guidance": False}
    max_text_tokens = TEXT_TOKENS
    max_side_px = 2048
    frames_per_latent = 8
    max_frames = 481  # 20 seconds: as sides, what positions are a share of
    target_sets = adapted_layers(
        r"transformer_blocks\.\d+",
        r"attn[12]\.(to_q|to_k|to_v|to_out\.0)",
        r"ff\.net\.(0\.proj|2)",
        r"attn[12]\.to_gate_logits",  # of the video's stream
    )
    excluded = {
        "modulation": "its blocks share their modulation layers, which hold 2% of the weights",
        "norm_rope": "its norms span all heads of a projection",
    }

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        # What 2.5 has besides lengthens prompts, and tells how long a clip should be.
        beside = dict.fromkeys(("prompt_enhancer", "processor", "duration_head"))
        return _connect(super().load_pipeline(folder, **{**beside, **components}))

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        is_first = config.get("use_prompt_embeddings", True)
        size = ("caption_channels", 3840) if is_first else ("cross_attention_dim", 4096)
        shapes = super().sample_shapes(config, bucket, text_tokens, num_controls)
        return {**shapes, "prompt_embeds": (text_tokens, config.get(*size))}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        raw: Tensor = vae.encode(pixels[None].to(vae.dtype)).latent_dist.mode()[0].to(pixels.dtype)
        tables = (vae.latents_mean, vae.latents_std)
        mean, std = (table.to(raw).view(-1, 1, 1, 1) for table in tables)
        latents: Tensor = (raw - mean) * float(vae.config.scaling_factor) / std
        return latents

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        size, _, frames, height, width = noisy.shape
        model, fps = unwrap_model(transformer), self.defaults.frames_per_second
        # The sound has no part in the video: one token, and a word.
        is_first = model.config.use_prompt_embeddings
        text = model.config.caption_channels if is_first else model.config.audio_cross_attention_dim
        # Made there by itself, the device would wait for the host twice.
        places = model.rope.prepare_video_coords(size, frames, height, width, "cpu", fps=fps)
        shape = {"num_frames": frames, "height": height, "width": width, "fps": fps}
        velocity: Tensor = transformer(
            hidden_states=noisy.flatten(2).mT,
            audio_hidden_states=noisy.new_zeros(size, 1, model.config.audio_in_channels),
            encoder_hidden_states=batch["prompt_embeds"],
            audio_encoder_hidden_states=noisy.new_zeros(size, 1, text),
            timestep=levels * 1000,
            sigma=levels * 1000,
            **shape,
            video_coords=send(places, noisy.device),
            audio_num_frames=1,
            isolate_modalities=True,
            return_dict=False,
        )[0]
        return velocity.mT.reshape(noisy.shape)

    def while_sampling(self, pipeline: Any, bucket: Bucket) -> AbstractContextManager[object]:
        # The pipeline's mask of the text masks nothing, and some attention backends take none.
        model: nn.Module = unwrap_model(pipeline.transformer)
        masks = {"encoder_attention_mask": None, "audio_encoder_attention_mask": None}
        return model.register_forward_pre_hook(
            lambda _, args, options: (args, {**options, **masks}), with_kwargs=True
        )

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        usual = super().call_options(pipeline, prompt, bucket, controls)
        usual["frame_rate"] = self.defaults.frames_per_second
        is_first = unwrap_model(pipeline.transformer).config.use_prompt_embeddings
        first = {"use_cross_timestep": False, "spatio_temporal_guidance_blocks": [29]}
        return usual | first if is_first else usual


class _Passed:
    # In the place of a pipeline's connectors, for prompts that have been through them.
    def __init__(self, connectors: Any) -> None:
        self.connectors = connectors

    def __call__(self, video: Tensor, audio: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return video, audio, video.new_ones(video.shape[:2])


def _connect(pipeline: Any) -> Any:
    """Let `encode_prompt` return what the connectors make of a prompt, for video and for sound in
    place of its mask: a thirtieth of what they take."""
    from diffusers.models.attention_dispatch import attention_backend

    stock = pipeline.encode_prompt

    def encode_prompt(*args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        prompts, mask, negative, negative_mask = stock(*args, **options)
        connectors, side = pipeline.connectors.connectors, pipeline.tokenizer.padding_side
        # A transformer's backend holds for all, and these always have a mask.
        with attention_backend("native"):
            connected = connectors(prompts, mask, padding_side=side)[:2]
            if negative is None:
                return *connected, None, None
            return *connected, *connectors(negative, negative_mask, side)[:2]

    pipeline.encode_prompt, pipeline.connectors = encode_prompt, _Passed(pipeline.connectors)
    return pipeline
