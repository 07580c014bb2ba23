"""A small Ideogram 4 pipeline."""

import diffusers
import torch
import transformers
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS

from tests.small.flux import small_vae
from tests.small.parts import QWEN_VL_CHAT, SIZES, qwen3_vl, qwen_tokenizer

TEXT_WIDTH = 32


def build_parts(family, captions):
    tokenizer = qwen_tokenizer(captions, QWEN_VL_CHAT, chat=QWEN_VL_CHAT)
    layers = QWEN3_VL_ACTIVATION_LAYERS
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "vae": small_vae(),
        "text_encoder": qwen3_vl(
            transformers.Qwen3VLModel, tokenizer, TEXT_WIDTH, num_layers=layers[-1] + 1
        ),
        "tokenizer": tokenizer,
        "transformer": _transformer(len(layers) * TEXT_WIDTH),
        "unconditional_transformer": _transformer(len(layers) * TEXT_WIDTH),
    }


@torch.no_grad()
def _transformer(text_width):
    sizes = {**SIZES["ideogram4"], "llm_features_dim": text_width}
    made = diffusers.Ideogram4Transformer2DModel(**sizes).eval()
    # Its velocity is the negative of the noise's part: it begins by predicting its input.
    made.final_layer.linear.weight.copy_(-torch.linalg.pinv(made.input_proj.weight))
    made.final_layer.linear.bias.zero_()
    return made
