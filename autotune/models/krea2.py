"""Krea 2: one stream of 28 blocks, twelve layers of Qwen3-VL as the text, Qwen-Image's VAE.

Short blocks make one text of those twelve layers. They are not adapted, so need no gradient.
"""

from pathlib import Path
from typing import Any

from autotune.models import facts, latents
from autotune.models.family import Batch, Family, Pixels, Sample, Sizes, Texts
from autotune.system.lazy import Tensor

MAX_TEXT_TOKENS = 512  # with what follows the prompt in the pipeline's template


class Krea2(Family):
    """Text to image. Prompts have their own length: padding is masked and takes no position."""

    name = "krea-2"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"krea": "krea-2"}
    pipeline_class = "Krea2Pipeline"
    transformer_class = "Krea2Transformer2DModel"
    latent_channels = ("in_channels", 64)
    counts_packed = True
    prompt_size = (("num_text_layers", 12), ("text_hidden_dim", 2560))
    max_text_tokens = MAX_TEXT_TOKENS
    masks_padding = True
    target_sets = latents.adapted_layers(
        r"transformer_blocks\.\d+",
        r"attn\.(to_q|to_k|to_v|to_gate|to_out\.0)",
        r"ff\.(gate|up|down)",
    )
    excluded = {
        "modulation": "a block's modulation is a table, of next to no weights",
        "norm_rope": (
            "several of its queries share a key, and a gate follows: the function supports neither"
        ),
    }

    def encode_caption(self, pipeline: Any, caption: str, controls: Pixels = ()) -> Sample:
        prompts, mask = pipeline.encode_prompt(caption, max_sequence_length=MAX_TEXT_TOKENS)
        return {"prompt_embeds": prompts[0][mask[0]]}

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        stock = latents.build_empty_pipeline(self.pipeline_class)
        texts = [stock.prompt_template_encode_prefix + caption for caption in captions]
        suffix = stock.prompt_template_encode_num_suffix_tokens
        added = suffix - stock.prompt_template_encode_start_idx
        lengths = latents.count_tokens(folder, texts)
        return [min(length + added, MAX_TEXT_TOKENS) for length in lengths]

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        from diffusers import Krea2Pipeline

        prompt, (rows, columns) = batch["prompt_embeds"], noisy.shape[3:]
        velocity: Tensor = transformer(
            hidden_states=latents.pack(noisy),
            encoder_hidden_states=prompt,
            timestep=levels,
            position_ids=Krea2Pipeline.prepare_position_ids(
                prompt.shape[1], rows // latents.PATCH, columns // latents.PATCH, noisy.device
            ),
            encoder_attention_mask=batch.get("prompt_mask"),
            return_dict=False,
        )[0]
        return latents.unpack(velocity, noisy.shape)
