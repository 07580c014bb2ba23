"""What both Kandinsky 5.0 families share: text blocks, then visual blocks that attend to the text; no mask anywhere.

The transformer takes latents with the channels last and cannot be told which prompt tokens are padding, so captions of
different lengths go through it one length at a time.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autotune.errors import InvalidInput
from autotune.families.base import Batch, Family, Sample, bare_pipeline, unwrapped
from autotune.schema import Bucket

if TYPE_CHECKING:
    from torch import Tensor, nn

VAE_FACTOR = 8
PATCH = 2
MAX_TEXT_TOKENS = 512
"""What the pipelines' calls cut prompts to."""

BLOCK = r"(text|visual)_transformer_blocks\.\d+"
ATTENTION = r"(self|cross)_attention\.(to_query|to_key|to_value|out_layer)"
MLP = r"feed_forward\.(in_layer|out_layer)"


class Kandinsky5(Family):
    """Prompts are encoded by Qwen2.5-VL at their own length; CLIP's pooled output joins the timestep."""

    transformer_class = "Kandinsky5Transformer3DModel"
    tiny_config: ClassVar[Mapping[str, Any]] = {
        "model_dim": 128,  # two heads of the published size
        "ff_dim": 128,
        "time_dim": 64,
        "in_text_dim": 64,
        "in_text_dim2": 32,
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
    }
    components = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
    size_multiple_px = VAE_FACTOR * PATCH
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.{ATTENTION}",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|(text|visual)_modulation\.out_layer)",
    }
    block_lists = ("text_transformer_blocks", "visual_transformer_blocks")

    def build_transformer(self, config: Mapping[str, Any]) -> "nn.Module":
        attention = config.get("attention_type", "regular")
        if attention != "regular":
            raise InvalidInput(
                f"this {self.name} uses {attention} attention, which cannot be trained here",
                hint="use a checkpoint with regular attention: the 5-second models have it",
            )
        return super().build_transformer(config)

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        from autotune.families.qwen_processor import Qwen2VLProcessor

        processor = Qwen2VLProcessor.from_pretrained(folder / "tokenizer")
        return super().load_pipeline(folder, **{"tokenizer": processor, **components})

    def sample_shapes(
        self, config: Mapping[str, Any], bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> dict[str, tuple[int, ...]]:
        frames = self._num_latent_frames(bucket.num_frames)
        size = (bucket.height_px // VAE_FACTOR, bucket.width_px // VAE_FACTOR)
        return {
            "latents": (config.get("in_visual_dim", 4), frames, *size),
            "prompt_embeds": (text_tokens, config.get("in_text_dim", 3584)),
            "pooled_prompt_embeds": (config.get("in_text_dim2", 768),),
        }

    def encode_captions(
        self, pipeline: Any, captions: Sequence[str], controls: Sequence[Sequence["Tensor"]] = ()
    ) -> list[Sample]:
        # One at a time: a lone prompt has no padding.
        encoded = (pipeline.encode_prompt(prompt=[caption]) for caption in captions)
        return [{"prompt_embeds": prompt[0], "pooled_prompt_embeds": pooled[0]} for prompt, pooled, _ in encoded]

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sequence[tuple[int, int]]] = ()
    ) -> list[int]:
        from diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i import prompt_clean
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
        pipeline = bare_pipeline(self.pipeline_class)
        texts = [pipeline.prompt_template.format(prompt_clean(caption)) for caption in captions]
        dropped = pipeline.prompt_template_encode_start_idx
        # Of a prompt that is too long the pipeline cuts characters, so a token or two fewer may remain.
        return [min(len(ids) - dropped, MAX_TEXT_TOKENS) for ids in tokenizer(texts)["input_ids"]]

    def predict(self, transformer: "nn.Module", noisy: "Tensor", sigmas: "Tensor", batch: Batch) -> "Tensor":
        import torch

        if "prompt_mask" not in batch:
            return self._predict_one_length(transformer, noisy, sigmas, batch)
        lengths = batch["prompt_mask"].sum(dim=1)
        velocity = torch.empty_like(noisy)
        for length in sorted(set(lengths.tolist())):
            chosen = lengths == length
            prompts = batch["prompt_embeds"][chosen, :length]
            part = {"prompt_embeds": prompts, "pooled_prompt_embeds": batch["pooled_prompt_embeds"][chosen]}
            velocity[chosen] = self._predict_one_length(transformer, noisy[chosen], sigmas[chosen], part)
        return velocity

    def _predict_one_length(
        self, transformer: "nn.Module", noisy: "Tensor", sigmas: "Tensor", batch: Batch
    ) -> "Tensor":
        import torch

        _, _, frames, height, width = noisy.shape
        visual = noisy.permute(0, 2, 3, 4, 1)
        if unwrapped(transformer).visual_cond:
            # Text to video conditions on no image: zeros, and a mask channel that says so.
            visual = torch.cat([visual, torch.zeros_like(visual), torch.zeros_like(visual[..., :1])], dim=-1)
        prompt = batch["prompt_embeds"]
        velocity: Tensor = transformer(
            hidden_states=visual,
            encoder_hidden_states=prompt,
            pooled_projections=batch["pooled_prompt_embeds"],
            timestep=(sigmas * 1000).to(noisy.dtype),
            visual_rope_pos=[
                torch.arange(length, device=noisy.device) for length in (frames, height // PATCH, width // PATCH)
            ],
            text_rope_pos=torch.arange(prompt.shape[1], device=noisy.device),
            scale_factor=self._rope_scale(height * VAE_FACTOR, width * VAE_FACTOR),
            return_dict=False,
        )
        return velocity.permute(0, 4, 1, 2, 3)

    def masks(self, micro_batch_size: int, text_padding: Literal["exact", "masked"]) -> bool:
        return False

    @abstractmethod
    def _num_latent_frames(self, num_frames: int) -> int:
        """Frames of the latents of a clip."""

    @abstractmethod
    def _rope_scale(self, height_px: int, width_px: int) -> tuple[float, float, float]:
        """Factors that the pipeline divides positions in time, height and width by."""
