"""A family that autotune does not have, as somebody would add it: AuraFlow."""

from autotune.models.facts import Defaults, Parts, PublishedModel
from autotune.models.family import Family
from autotune.models.latents import ATTENTION, ImageLatents, adapted_layers


class AuraFlow(ImageLatents, Family):
    """Unpacked latents; one T5 as the text encoder."""

    name = "aura-flow"
    models = (
        PublishedModel("fal/AuraFlow-v0.3", "aura-flow", {"pos_embed_max_size": 9216}, Parts()),
    )
    pipeline_class = "AuraFlowPipeline"
    transformer_class = "AuraFlowTransformer2DModel"
    tiny_config = {  # noqa: RUF012
        "num_mmdit_layers": 1, "num_single_dit_layers": 1, "num_attention_heads": 2,
        "attention_head_dim": 64, "caption_projection_dim": 128,
    }  # fmt: skip
    defaults = Defaults(timestep_shift=1.73, preview_steps=50, sampling_guidance=3.5)
    casts_to_weight_dtype = True
    max_side_px = 96 * 16
    latent_channels = ("in_channels", 4)
    prompt_size = (("joint_attention_dim", 2048),)
    encode_options = {"do_classifier_free_guidance": False}  # noqa: RUF012
    max_text_tokens = 256
    target_sets = adapted_layers(
        r"(joint|single)_transformer_blocks\.\d+", ATTENTION,
        r"ff(_context)?\.(linear_1|linear_2|out_projection)", r"norm1(_context)?\.linear",
    )  # fmt: skip
    block_lists = ("joint_transformer_blocks", "single_transformer_blocks")

    def predict(self, transformer, noisy, levels, batch):
        return transformer(
            hidden_states=noisy[:, :, 0], encoder_hidden_states=batch["prompt_embeds"],
            timestep=levels, return_dict=False,
        )[0][:, :, None]  # fmt: skip
