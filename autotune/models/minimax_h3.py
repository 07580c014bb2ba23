"""MiniMax H3: one stream of text, sound and video in 50 blocks, Qwen3-VL 32B for the text.

Its pipeline has two transformers with layers of the same names. `transformer`, which makes clips
of text, is trained and loaded; `transformer_ref`, for references, is not. Sound is not
trained: its rows are left out, as SimpleTuner does (`minimax_h3_target_mode: video`).
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image

from autotune.models import facts, family, latents, modular
from autotune.models.family import Batch, Images, Options, Pixels, Sample, Sizes, Texts
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, torch

# Its VAE makes five latents of 17 frames, drops the last three, and decodes no fewer than seven.
CHUNK_FRAMES, CHUNK_LATENTS = 17, 5
FIRST_FRAMES, FIRST_LATENTS = 22, 7
NO_WORD = " "  # an empty caption has no token, which its text encoder would not take
COLORS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation of ImageNet's
VIDEO, TEXT, SOUND = 0, 1, 2  # tags of rows, as the pipeline's


class MiniMaxH3(latents.QwenProcessor, modular.ModularFamily):
    """Text to video, without guidance. A row of the video stands for 2x2 latents of a frame."""

    name = "minimax-h3"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"h3": "minimax-h3", "hailuo-3": "minimax-h3", "hailuo-h3": "minimax-h3"}
    pipeline_class = "MiniMaxH3ModularPipeline"
    workflow = "t2va"
    text_blocks = ("text_encoder",)
    components = (
        *("transformer", "vae", "audio_vae", "text_encoder", "tokenizer", "processor"),
        *("scheduler", "audio_scheduler"),
    )
    processor = ("processor", "Qwen3VLProcessor")
    decoders = ("vae", "audio_vae")
    transformer_class = "MiniMaxH3Transformer3DModel"
    untrained_files = r"ref2va|transformer_ref"
    latent_channels = ("in_channels", 24)
    prompt_size = (("text_dim", 5120),)
    max_text_tokens = 4096  # it cuts none
    separates_prompts = True
    max_micro_batch_size = 1  # of which it has one noise level
    latent_px = 16
    size_multiple_px = 32
    max_side_px = 2048
    max_frames = 345  # of at most 15 seconds
    block_lists = ("token_refiner.refiner_blocks", "transformer_blocks")
    target_sets = latents.adapted_layers(
        r"(transformer_blocks|token_refiner\.refiner_blocks)\.\d+",
        r"attn\.(to_q|to_k|to_v|to_out\.0)",
        r"ff\.net\.(0\.proj|2)",
        r"adaln_proj\.linear",
    )
    excluded = {
        "modulation": (
            "each block activates the noise level by a function, not a module; those layers hold "
            "39% of the weights"
        ),
        "norm_rope": "it rotates halves of a part of a head, where the function rotates neighbors",
    }

    def num_latent_frames(self, num_frames: int) -> int:
        chunks = (num_frames - FIRST_FRAMES) // CHUNK_FRAMES
        return 1 if chunks < 0 else chunks * CHUNK_LATENTS + FIRST_LATENTS

    def whole_frames(self, num_frames: int) -> int:
        chunks = (num_frames - FIRST_FRAMES) // CHUNK_FRAMES
        return 1 if chunks < 0 else chunks * CHUNK_FRAMES + FIRST_FRAMES

    def encode_caption(self, pipeline: Any, caption: str, controls: Pixels = ()) -> Sample:
        return super().encode_caption(pipeline, caption or NO_WORD)

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        tokenize = latents.load_tokenizer(folder)
        texts = [caption or NO_WORD for caption in captions]
        return [len(ids) for ids in tokenize(texts, add_special_tokens=False)["input_ids"]]

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        mean, std = (pixels.new_tensor(each).view(-1, 1, 1, 1) for each in COLORS)
        return super().encode_pixels(pipeline, ((pixels + 1) / 2 - mean) / std)

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        return latents if latents.shape[2] > 1 else latents.expand(-1, -1, FIRST_LATENTS, -1, -1)

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

        predicted, size, config = [], latents.PATCH, family.unwrap_model(transformer).config
        channels, frames, height, width = noisy.shape[1:]
        rows, columns = height // size, width // size
        for number, clean in enumerate(1 - levels):
            prompt = batch[f"prompt_embeds_{number}"]
            places, tags, *indices, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                torch.full((len(prompt),), TEXT),
                *(frames, height, width, 0, (1, size, size), 2, SOUND, VIDEO),
            )
            places, tags, video, sound, text = (
                latents.send(each, noisy.device) for each in (places.float(), tags, *indices)
            )
            patches = noisy[number].view(channels, frames, rows, size, columns, size)
            velocity = transformer(
                hidden_states=patches.permute(1, 2, 4, 0, 3, 5).reshape(1, len(video), -1),
                audio_hidden_states=noisy.new_zeros(1, 0, config.audio_in_channels),
                encoder_hidden_states=prompt[None],
                timestep=clean[None],
                timestep_indices=torch.zeros_like(tags),
                token_tags=tags,
                position_ids=places,
                video_indices=video,
                audio_indices=sound,
                text_indices=text,
                return_dict=False,
            )[0]
            patches = velocity.view(frames, rows, columns, channels, size, size)
            predicted.append(patches.permute(3, 0, 1, 4, 2, 5).reshape(noisy.shape[1:]))
        # It counts time from noise to video, and so predicts the velocity's negative.
        return -torch.stack(predicted)

    def sample(self, pipeline: Any, prompt: str, bucket: Bucket, **how: Any) -> list[Image.Image]:
        # Of a picture it makes the shortest clip.
        return super().sample(pipeline, prompt, bucket, **how)[: bucket.num_frames]

    def call_options(self, pipeline: Any, prompt: str, bucket: Bucket, controls: Images) -> Options:
        frames = max(FIRST_FRAMES, self.whole_frames(bucket.num_frames))
        return {"prompt": prompt or NO_WORD, "num_frames": frames}

    def while_sampling(self, pipeline: Any, bucket: Bucket) -> AbstractContextManager[object]:
        # It refuses clips of less than five seconds.
        return mock.patch.object(type(pipeline), "min_duration", 0.0)
