"""Z-Image: one stream of 30 blocks after two short refiners, Qwen3, FLUX.1's autoencoder."""

from pathlib import Path
from typing import Any

from autotune.models.facts import AttentionLayout, family_facts
from autotune.models.family import Batch, Family, Sizes, Texts
from autotune.models.latents import ImageLatents, adapted_layers, as_chats, load_tokenizer
from autotune.system.lazy import Tensor, torch

MAX_TEXT_TOKENS = 512  # length to which the pipeline cuts prompts, its template included


class ZImage(ImageLatents, Family):
    """Text to image. The transformer takes lists: each prompt of a batch keeps its length."""

    name = "z-image"
    models, defaults, tiny_config = family_facts(name)
    aliases = {"z-image-base": "z-image"}
    pipeline_class = "ZImagePipeline"
    transformer_class = "ZImageTransformer2DModel"
    prompt_size = (("cap_feat_dim", 2560),)
    encode_options = {"do_classifier_free_guidance": False}
    separates_prompts = True
    text_multiple = 32
    max_text_tokens = MAX_TEXT_TOKENS
    masks_padding = True
    target_sets = adapted_layers(
        r"(noise_refiner|context_refiner|layers)\.\d+",
        r"attention\.(to_q|to_k|to_v|to_out\.0)",
        r"feed_forward\.w[123]",
        r"adaLN_modulation\.0",
    )
    block_lists = ("noise_refiner", "context_refiner", "layers")
    fp16_overflow = "in fp16 its activations overflow: Tongyi-MAI/Z-Image#14"
    excluded = {"modulation": "its modulation layers hold 2% of the weights"}
    attention_layouts = (AttentionLayout("ZSingleStreamAttnProcessor", "complex", "freqs_cis"),)

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        tokenizer = load_tokenizer(folder)
        chats = as_chats(tokenizer, captions, enable_thinking=True)
        return [min(len(ids), MAX_TEXT_TOKENS) for ids in tokenizer(chats)["input_ids"]]

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        prompts = [batch[f"prompt_embeds_{number}"] for number in range(len(noisy))]
        # It counts time from noise to image, and so predicts the velocity's negative.
        velocity = transformer(list(noisy.unbind()), 1 - levels, prompts, return_dict=False)[0]
        return -torch.stack(velocity)
