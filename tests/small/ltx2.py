"""Small LTX-2.3 and 2.5 pipelines."""

import diffusers
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

from tests.small.parts import SIZES, dynamic_scheduler, gemma3, gemma_tokenizer, invert_input_layer


def build_later_parts(family, captions):
    """Of LTX-2.5: Gemma 4, and a head that tells how long a clip should be."""
    model = next(each for each in family.models if each.name == "ltx-2.5")
    parts = build_parts(family, captions, model.config)
    text = {**SIZES["gemma4"], "vocab_size": len(parts["tokenizer"])}
    kind = transformers.Gemma4UnifiedForConditionalGeneration
    parts["text_encoder"] = kind(transformers.Gemma4UnifiedConfig(text_config=text)).eval()
    parts["duration_head"] = LTX2DurationHead(128, 64).eval()
    return parts


def build_parts(family, captions, config=None):
    tokenizer = gemma_tokenizer(captions, max_length=1024)
    text_encoder = gemma3(tokenizer, hidden_size=64, num_layers=2)
    transformer = diffusers.LTX2VideoTransformer3DModel(
        **SIZES["ltx2"], **(config or family.transformer_config)
    )
    invert_input_layer(transformer.proj_out, transformer.proj_in.weight)
    video_vae = {**family.models[0].parts.vae_config, **SIZES["ltx2-video-vae"]}
    return {
        "scheduler": dynamic_scheduler((1024, 0.95), (4096, 2.05), shift_terminal=0.1),
        "vae": diffusers.AutoencoderKLLTX2Video(**video_vae).eval(),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(**SIZES["ltx2-audio-vae"]).eval(),
        "vocoder": LTX2Vocoder(**SIZES["ltx2-vocoder"]).eval(),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "connectors": LTX2TextConnectors(**SIZES["ltx2-connectors"]).eval(),
        "transformer": transformer,
    }
