"""Qwen-Image: a 60-block double-stream transformer, a Qwen2.5-VL text encoder, a 16-channel causal video VAE."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autotune.families.base import Batch, Defaults, Family, Sample
from autotune.schema import Bucket

if TYPE_CHECKING:
    from torch import Tensor, nn

VAE_FACTOR = 8
PATCH = 2


class QwenImage(Family):
    """Text to image. Latents are packed in 2x2 patches; prompts are encoded at their own length."""

    name = "qwen-image"
    hub_id = "Qwen/Qwen-Image"
    pipeline_class = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    components = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    transformer_config: ClassVar[Mapping[str, Any]] = {}  # the class's own defaults are the published model
    # Rank and rate: what musubi-tuner, SimpleTuner and diffusers users run; shift 2.2 is musubi-tuner's.
    defaults = Defaults(
        rank=16,
        lora_alpha=16.0,
        learning_rate=1e-4,
        weight_decay=1e-3,
        effective_batch_size=4,
        resolution_px=1024,
        text_tokens=256,
        timestep_shift=2.2,
        preview_steps=20,
    )
    size_multiple_px = VAE_FACTOR * PATCH
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    }
    block_lists = ("transformer_blocks",)

    def sample_shapes(self, config: Mapping[str, Any], bucket: Bucket, text_tokens: int) -> dict[str, tuple[int, ...]]:
        channels = config.get("in_channels", 64) // PATCH**2
        return {
            "latents": (channels, 1, bucket.height_px // VAE_FACTOR, bucket.width_px // VAE_FACTOR),
            "prompt_embeds": (text_tokens, config.get("joint_attention_dim", 3584)),
        }

    def encode_captions(self, pipeline: Any, captions: Sequence[str]) -> list[Sample]:
        # One at a time: a lone prompt has no padding, so what is cached is exact and needs no mask.
        return [{"prompt_embeds": pipeline.encode_prompt(prompt=[caption])[0][0]} for caption in captions]

    def count_text_tokens(self, folder: Path, captions: Sequence[str]) -> list[int]:
        from diffusers import QwenImagePipeline
        from transformers import AutoTokenizer

        # The template and what it drops are attributes that the pipeline sets in its constructor.
        pipeline = QwenImagePipeline(
            scheduler=None,
            vae=None,
            text_encoder=None,
            transformer=None,
            tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        )
        template, dropped = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
        longest = pipeline.tokenizer_max_length
        ids = pipeline.tokenizer([template.format(caption) for caption in captions])["input_ids"]
        return [min(len(tokens) - dropped, longest) for tokens in ids]

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        vae = pipeline.vae
        mean = pixels.new_tensor(vae.config.latents_mean).view(-1, 1, 1, 1)
        std = pixels.new_tensor(vae.config.latents_std).view(-1, 1, 1, 1)
        latents: Tensor = vae.encode(pixels[None].to(vae.dtype)).latent_dist.mode()[0]
        return (latents.to(pixels.dtype) - mean) / std

    def collate(self, samples: Sequence[Sample]) -> Batch:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        prompts = [sample["prompt_embeds"] for sample in samples]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        batch: Batch = {
            "latents": torch.stack([sample["latents"] for sample in samples]),
            "prompt_embeds": pad_sequence(prompts, batch_first=True),
        }
        if len(set(lengths.tolist())) > 1:
            batch["prompt_mask"] = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        return batch

    def predict(self, transformer: "nn.Module", noisy: "Tensor", sigmas: "Tensor", batch: Batch) -> "Tensor":
        size, channels, frames, height, width = noisy.shape
        rows, columns = height // PATCH, width // PATCH
        packed = noisy.view(size, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
        velocity: Tensor = transformer(
            hidden_states=packed.reshape(size, rows * columns, channels * PATCH**2),
            encoder_hidden_states=batch["prompt_embeds"],
            encoder_hidden_states_mask=batch.get("prompt_mask"),
            timestep=sigmas.to(noisy.dtype),
            img_shapes=[[(frames, rows, columns)]] * size,
            return_dict=False,
        )[0]
        unpacked = velocity.view(size, rows, columns, channels, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        return unpacked.reshape(noisy.shape)

    def masks(self, micro_batch_size: int, text_padding: Literal["exact", "masked"]) -> bool:
        return micro_batch_size > 1 and text_padding == "masked"

    def write_small_pipeline(self, folder: Path, captions: Sequence[str], seed: int) -> None:
        import torch
        from diffusers import (
            AutoencoderKLQwenImage,
            FlowMatchEulerDiscreteScheduler,
            QwenImagePipeline,
            QwenImageTransformer2DModel,
        )

        from autotune.families.small_parts import qwen_text_encoder, qwen_tokenizer

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokenizer = qwen_tokenizer(captions)
            text_encoder = qwen_text_encoder(tokenizer, hidden_size=128)
            transformer = QwenImageTransformer2DModel(
                in_channels=64,
                out_channels=16,
                num_layers=6,
                attention_head_dim=32,
                num_attention_heads=4,
                joint_attention_dim=128,
                axes_dims_rope=(8, 12, 12),
            )
            vae = AutoencoderKLQwenImage(base_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
        scheduler = FlowMatchEulerDiscreteScheduler(
            shift=1.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            time_shift_type="exponential",
        )
        QwenImagePipeline(
            scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
        ).save_pretrained(folder)
