"""Stable Diffusion 3.5: joint blocks of text and image, two CLIPs and T5.

Of medium, the first 13 blocks attend a second time, among the image's tokens alone.
"""

from typing import Any

from autotune.models.facts import ModulationLayers, family_facts
from autotune.models.family import COMPONENTS, Batch, Family
from autotune.models.latents import ATTENTION, ImageLatents, adapted_layers
from autotune.system.lazy import Tensor

TEXT_TOKENS = 77 + 256  # of both CLIPs side by side, then of T5; the padding is not masked
BLOCK = r"transformer_blocks\.\d+"


class StableDiffusion35(ImageLatents, Family):
    """Text to image. Prompts always have the same length."""

    name = "sd3.5"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"sd3.5-large": "sd3.5", "stable-diffusion-3.5": "sd3.5"}
    pipeline_class = "StableDiffusion3Pipeline"
    transformer_class = "SD3Transformer2DModel"
    components = (*COMPONENTS, "text_encoder_2", "text_encoder_3", "tokenizer_2", "tokenizer_3")
    casts_to_weight_dtype = True
    max_side_px = 192 * 16  # of large: medium's table of positions is twice as wide
    pooled_size = ("pooled_projection_dim", 2048)
    pooled_output = 2
    encode_options = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    max_text_tokens = TEXT_TOKENS
    caption_tokenizer, max_caption_tokens = "tokenizer_3", 256
    target_sets = adapted_layers(
        BLOCK,
        rf"{ATTENTION}|attn2\.(to_q|to_k|to_v|to_out\.0)",
        r"ff(_context)?\.net\.(0\.proj|2)",
        r"norm1(_context)?\.linear",
    )
    modulation = ModulationLayers(
        rf"{BLOCK}\.norm1(_context)?|norm_out",
        ("time_text_embed",),
        inputs=("pooled_prompt_embeds",),
    )
    excluded = {
        "attention": "its attention calls PyTorch's directly, whatever backend is set",
        "norm_rope": "it does not rotate queries and keys: positions are added to the patches",
    }

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        velocity: Tensor = transformer(
            hidden_states=noisy[:, :, 0],
            timestep=1000 * levels,
            encoder_hidden_states=batch["prompt_embeds"],
            pooled_projections=batch["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity[:, :, None]
