"""HunyuanVideo 1.5, text to video: 54 double-stream blocks, Qwen2.5-VL for the prompt, ByT5 for
quoted text in it.

Single images train it as well. Image to video is left out: its pipeline is another class, and needs
an image encoder. Half of the transformer's input channels are for an image to begin with; they are
zero here, as in the pipeline.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.attention import ADDED_TEXT, AttentionLayout
from autotune.families.base import Batch, Family, Sample, Shapes, Sizes, unwrap_model
from autotune.families.modulation import ModulationLayers
from autotune.families.packing import ATTENTION
from autotune.families.published import Config, Defaults, Parts, PublishedModel
from autotune.families.tokens import load_tokenizer
from autotune.runtime import lazy_module
from autotune.schema import Bucket

if TYPE_CHECKING:
    import torch
    import transformers
    from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as stock
    from PIL import Image
    from torch import Tensor, nn

    from autotune.families import hunyuan_transformer as unpadded
else:
    stock = lazy_module("diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5")
    torch = lazy_module("torch")
    transformers = lazy_module("transformers")
    unpadded = lazy_module("autotune.families.hunyuan_transformer")

PARTS = Parts((7_070_619_136, 219_314_944), "AutoencoderKLHunyuanVideo15")
LICENSE = "tencent-hunyuan-community"
SOURCE = (
    "README.md of Tencent-Hunyuan/HunyuanVideo-1.5@60783e7: 8.3 billion; configuration in "
    "scripts/convert_hunyuan_video1_5_to_diffusers.py of huggingface/diffusers@38c42b4"
)
LATENT_PX = 16
PROMPT_TOKENS, GLYPH_TOKENS = 1000, 256
"""Where the pipeline cuts a prompt, and the text quoted in it."""
BLOCK = r"transformer_blocks\.\d+"
MLP = r"(ff|ff_context)\.net\.(0\.proj|2)"


class HunyuanVideo15(Family):
    """Latents are those of a causal video autoencoder; one is one token. Prompts keep their own
    length.

    An encoded prompt begins with what ByT5 makes of quoted text, which is narrower: zeros fill it
    up.
    """

    name = "hunyuanvideo-1.5"
    models = (
        PublishedModel(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
            {"task_type": "t2v"},
            PARTS,
            num_parameters=8_326_608_160,
            license=LICENSE,
            source=SOURCE,
            note="its authors advise the optimizer Muon, which autotune has not",
        ),
        PublishedModel(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
            {"task_type": "t2v", "target_size": 960},
            PARTS,
            name="hunyuanvideo-1.5-720p",
            num_parameters=8_326_608_160,
            license=LICENSE,
            source=SOURCE,
        ),
    )
    pipeline_class = "HunyuanVideo15Pipeline"
    transformer_class = "HunyuanVideo15Transformer3DModel"
    small_pipeline = "hunyuan_video15"
    components = (
        *(
            "transformer",
            "vae",
            "text_encoder",
            "text_encoder_2",
            "tokenizer",
            "tokenizer_2",
            "scheduler",
            "guider",
        ),
    )
    adapter_loader = "transformer.load_lora_adapter"
    tiny_config: ClassVar[Config] = {
        **{"num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2},
        **{"text_embed_dim": 64, "text_embed_2_dim": 32, "image_embed_dim": 32},
    }
    defaults = Defaults(
        learning_rate=5e-5,
        effective_batch_size=1,
        resolution_px=640,
        text_tokens=256,
        timestep_shift=3.0,
        preview_steps=50,
        sampling_guidance=6.0,
        num_frames=121,  # five seconds at 24 frames per second, and the first frame
        sources={
            "learning_rate": "the authors' train.py",
            "timestep_shift": "the authors' train.py",
            "preview_steps": "the pipeline's default",
            "sampling_guidance": "the model's guider",
        },
    )
    size_multiple_px = LATENT_PX
    patch = 1
    max_text_tokens = PROMPT_TOKENS + GLYPH_TOKENS
    frames_per_latent = 4
    max_frames = 241  # ten seconds, the longest that its authors make
    casts_to_weight_dtype = True
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        # the video's, as for Qwen-Image
        "attention": rf"{BLOCK}\.attn\.(to_q|to_k|to_v|to_out\.0)",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|(norm1|norm1_context)\.linear)",
    }
    block_lists = ("transformer_blocks",)
    modulation = ModulationLayers(rf"{BLOCK}\.(norm1|norm1_context)|norm_out", ("time_embed",))
    attention_layouts = (
        AttentionLayout(
            "HunyuanVideo15AttnProcessor2_0", "cos_sin", "image_rotary_emb", text=ADDED_TEXT
        ),
    )

    def build_transformer(self, config: Config) -> "nn.Module":
        known = {name: value for name, value in config.items() if not name.startswith("_")}
        model: nn.Module = unpadded.HunyuanVideo15Transformer3DModel(**known)
        return model

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        if self.denoiser not in components:
            dtype = components.get("torch_dtype")
            model = unpadded.HunyuanVideo15Transformer3DModel.from_pretrained(
                folder / self.denoiser, torch_dtype=dtype
            )
            components[self.denoiser] = model
        return super().load_pipeline(folder, **components)

    def sample_shapes(
        self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1
    ) -> Shapes:
        size = (bucket.height_px // LATENT_PX, bucket.width_px // LATENT_PX)
        return {
            "latents": (
                config.get("out_channels", 32),
                self.num_latent_frames(bucket.num_frames),
                *size,
            ),
            "prompt_embeds": (text_tokens, config.get("text_embed_dim", 3584)),
        }

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence["Tensor"] = ()
    ) -> Sample:
        text, mask, glyphs, glyph_mask = (tensor[0] for tensor in pipeline.encode_prompt(caption))
        own, quoted = text[mask > 0], glyphs[glyph_mask > 0]
        filled = torch.nn.functional.pad(quoted, (0, own.shape[1] - quoted.shape[1]))
        return {"prompt_embeds": torch.cat([filled, own])}

    def count_text_tokens(
        self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()
    ) -> list[int]:
        rules, tokenizer = prompt_rules(), load_tokenizer(folder)
        chats = stock.format_text_input(list(captions), rules["system_message"])
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        encoded = tokenizer.apply_chat_template(chats, **options)["input_ids"]
        counts = [min(len(ids) - rules["crop_start"], PROMPT_TOKENS) for ids in encoded]
        byt5 = transformers.ByT5Tokenizer.from_pretrained(folder / "tokenizer_2")
        for number, caption in enumerate(captions):
            if quoted := stock.extract_glyph_texts(caption):
                counts[number] += min(len(byt5(quoted)["input_ids"]), GLYPH_TOKENS)
        return counts

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        vae = pipeline.vae
        unpadded.prepare_vae(vae)
        latents: Tensor = vae.encode(pixels[None].to(vae.dtype)).latent_dist.mode()[0]
        return latents.to(pixels.dtype) * float(vae.config.scaling_factor)

    def predict(
        self, transformer: "nn.Module", noisy: "Tensor", levels: "Tensor", batch: Batch
    ) -> "Tensor":
        prompts, width = batch["prompt_embeds"], unwrap_model(transformer).config.text_embed_2_dim
        lengths, quoted = [prompts.shape[1]] * len(noisy), [0] * len(noisy)
        if "prompt_mask" in batch:
            lengths = batch["prompt_mask"].sum(dim=1).tolist()
        if not noisy.is_meta:  # a trace has no numbers, and takes all tokens for the prompt's
            quoted = ((prompts[..., width:] == 0).all(-1) & prompts.any(-1)).sum(dim=1).tolist()
        kinds = list(zip(lengths, quoted, strict=True))
        if len(set(kinds)) == 1:
            return self._predict_alike(transformer, noisy, levels, prompts, *kinds[0])
        velocity = torch.empty_like(
            noisy
        )  # one pass for those that are alike: padding would need a mask
        for kind in sorted(set(kinds)):
            rows = [row for row, own in enumerate(kinds) if own == kind]
            velocity[rows] = self._predict_alike(
                transformer, noisy[rows], levels[rows], prompts[rows], *kind
            )
        return velocity

    def _predict_alike(
        self,
        transformer: "nn.Module",
        noisy: "Tensor",
        levels: "Tensor",
        prompts: "Tensor",
        length: int,
        quoted: int,
    ) -> "Tensor":
        width = unwrap_model(transformer).config.text_embed_2_dim
        velocity: Tensor = transformer(
            hidden_states=torch.cat(
                [noisy, torch.zeros_like(noisy), torch.zeros_like(noisy[:, :1])], dim=1
            ),
            timestep=(levels * 1000).to(noisy.dtype),
            encoder_hidden_states=prompts[:, quoted:length],
            encoder_hidden_states_2=prompts[:, :quoted, :width] if quoted else None,
            return_dict=False,
        )[0]
        return velocity

    def sample(
        self, pipeline: Any, prompt: str, bucket: Bucket, **options: Any
    ) -> list["Image.Image"]:
        model = unwrap_model(pipeline.transformer)
        handle = model.register_forward_pre_hook(unpadded.leave_out_padding, with_kwargs=True)
        try:
            return super().sample(pipeline, prompt, bucket, **options)
        finally:
            handle.remove()

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        return {"prompt": prompt, "num_frames": bucket.num_frames, "output_type": "pil"}


def prompt_rules() -> dict[str, Any]:
    """Defaults of the pipeline's function that encodes prompts: its template and how much of
    that it drops.
    """
    encode = stock.HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    return {name: each.default for name, each in inspect.signature(encode).parameters.items()}
