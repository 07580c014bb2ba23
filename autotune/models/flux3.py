"""FLUX.3 [klein]: blocks of text and of the image alone, then of both; eight layers of Qwen3-VL 4B.

Its blocks for reference images are not trained: they see none here.
"""

from pathlib import Path
from typing import Any

from autotune.models import facts, latents
from autotune.models.family import Batch, Sizes, Texts
from autotune.models.flux2 import Flux2Klein
from autotune.models.modular import ModularFamily
from autotune.system.lazy import Tensor, torch

PAD_MULTIPLE = 80  # to which the pipeline pads each prompt; the model attends to the padding, too
MAX_TEXT_TOKENS = 8192
IMAGE_SCALE = 0.5  # of rows and columns in a position


class Flux3(ModularFamily, Flux2Klein):
    """Text to image, without the prompt upsampler. Latents are FLUX.2's."""

    name = "flux3"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"flux3-klein": "flux3", "flux3-klein-base": "flux3"}
    pipeline_class = "Flux3ModularPipeline"
    workflow = "text2image"
    text_blocks = ("text_encoder",)
    unused_blocks = ("prompt_upsampler",)
    components = ("transformer", "vae", "text_encoder", "tokenizer")
    transformer_class = "Flux3Transformer2DModel"
    prompt_size = (("joint_attention_dim", 20480),)
    max_text_tokens = MAX_TEXT_TOKENS
    separates_prompts = True
    max_side_px = 4096
    block_lists = ("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks")
    target_sets = latents.adapted_layers(
        r"(txt_mode_blocks|mode_blocks\.image|single_transformer_blocks)\.\d+",
        r"attn\.(to_q|to_k|to_v|to_out\.0)",
        r"ff\.linear_(in|out)",
    )
    attention_layouts = ()
    excluded = {
        "modulation": "its blocks share their modulation layers, which hold 3% of the weights",
        "norm_rope": "it computes them in fp32 from queries and keys, where the function rounds",
    }

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        processor = latents.load_processor("Qwen3VLProcessor", folder / "tokenizer")
        return super().load_pipeline(folder, **{"tokenizer": processor, **components})

    def count_text_tokens(self, folder: Path, captions: Texts, controls: Sizes = ()) -> list[int]:
        tokenizer = latents.load_tokenizer(folder)
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True
            )
            for caption in captions
        ]
        lengths = [len(ids) for ids in tokenizer(chats)["input_ids"]]
        return [min(-(-n // PAD_MULTIPLE) * PAD_MULTIPLE, MAX_TEXT_TOKENS) for n in lengths]

    def predict(self, transformer: Any, noisy: Tensor, levels: Tensor, batch: Batch) -> Tensor:
        prompts = [batch[f"prompt_embeds_{number}"] for number in range(len(noisy))]
        if len({len(prompt) for prompt in prompts}) > 1:  # more padding would be seen
            rows = zip(noisy[:, None], levels[:, None], prompts, strict=True)
            return torch.cat(
                [
                    self.predict(transformer, one, level, {"prompt_embeds_0": prompt})
                    for one, level, prompt in rows
                ]
            )
        # A position is (time, row, column, place in the text).
        sides = (torch.arange(side) * IMAGE_SCALE for side in noisy.shape[3:])
        zero, places = torch.zeros(1), torch.arange(float(len(prompts[0])))
        velocity: Tensor = transformer(
            hidden_states=noisy.flatten(2).mT,
            encoder_hidden_states=torch.stack(prompts),
            timestep=levels,
            img_ids=latents.send(torch.cartesian_prod(zero, *sides, zero), noisy.device),
            txt_ids=latents.send(torch.cartesian_prod(zero, zero, zero, places), noisy.device),
            return_dict=False,
        )[0]
        return velocity.mT.reshape(noisy.shape)
