"""FLUX.1 [dev]: 19 double-stream and 38 single-stream blocks, T5 and CLIP, guidance as an input of the transformer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.attention import ADDED_TEXT, AttentionLayout
from autotune.families.base import Batch, Family, Sample, Shapes, Sizes
from autotune.families.latents import encode_image
from autotune.families.modulation import ModulationLayers
from autotune.families.packing import ATTENTION, PATCH, VAE_FACTOR, pack, unpack
from autotune.families.published import FLUX_VAE, Config, Defaults, Parts, PublishedModel
from autotune.schema import Bucket

if TYPE_CHECKING:
    from torch import Tensor, nn

TEXT_TOKENS = 512
"""Length that the pipeline pads every prompt to. It masks nothing: the model was trained to attend to the padding."""

BLOCK = r"(single_)?transformer_blocks\.\d+"
MLP = r"ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out"


class Flux1Dev(Family):
    """Text to image. Latents are packed in 2x2 patches; prompts always have the same length."""

    name = "flux1-dev"
    models = (
        PublishedModel(
            "black-forest-labs/FLUX.1-dev",
            {"guidance_embeds": True},
            Parts((123_060_480, 4_762_310_656), "AutoencoderKL", FLUX_VAE),
            num_parameters=11_901_408_320,
            license="flux-1-dev-non-commercial-license",
            source="the configuration on the hub",
        ),
    )
    pipeline_class = "FluxPipeline"
    transformer_class = "FluxTransformer2DModel"
    components = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
    tiny_config: ClassVar[Config] = {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
    }
    defaults = Defaults(
        learning_rate=1e-4,
        resolution_px=1024,
        text_tokens=TEXT_TOKENS,
        timestep_shift=3.1582,
        preview_steps=28,
        preview_calls=1,
        sampling_guidance=3.5,
        training_guidance=1.0,
        shift_by_tokens=((256, 0.5), (4096, 1.15)),
        sources={
            "rank": "ai-toolkit's example",
            "learning_rate": "ai-toolkit's example",
            "timestep_shift": "kohya's guide: exp(1.15), the pipeline's own at 1024 px",
            "training_guidance": "kohya's guide: 1 in training, one samples with 3.5",
        },
    )
    casts_to_weight_dtype = True
    size_multiple_px = VAE_FACTOR * PATCH
    max_text_tokens = TEXT_TOKENS
    target_sets: ClassVar[Mapping[str, Sequence[str] | str]] = {
        "attention": rf"{BLOCK}\.({ATTENTION})",
        "attention+mlp": rf"{BLOCK}\.({ATTENTION}|{MLP})",
        "all-linear": rf"{BLOCK}\.({ATTENTION}|{MLP}|norm(1|1_context)?\.linear)",
    }
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    modulation = ModulationLayers(
        rf"{BLOCK}\.norm(1|1_context)?|norm_out", ("time_text_embed",), inputs=("pooled_prompt_embeds",)
    )
    attention_layouts = (AttentionLayout("FluxAttnProcessor", "cos_sin", "image_rotary_emb", text=ADDED_TEXT),)

    def sample_shapes(self, config: Config, bucket: Bucket, text_tokens: int, num_controls: int = 1) -> Shapes:
        channels = config.get("in_channels", 64) // PATCH**2
        return {
            "latents": (channels, 1, bucket.height_px // VAE_FACTOR, bucket.width_px // VAE_FACTOR),
            "prompt_embeds": (text_tokens, config.get("joint_attention_dim", 4096)),
            "pooled_prompt_embeds": (config.get("pooled_projection_dim", 768),),
        }

    def encode_caption(self, pipeline: Any, caption: str, controls: Sequence["Tensor"] = ()) -> Sample:
        prompt, pooled, _ = pipeline.encode_prompt(prompt=caption, prompt_2=None)
        return {"prompt_embeds": prompt[0], "pooled_prompt_embeds": pooled[0]}

    def count_text_tokens(self, folder: Path, captions: Sequence[str], controls: Sequence[Sizes] = ()) -> list[int]:
        return [TEXT_TOKENS] * len(captions)

    def encode_pixels(self, pipeline: Any, pixels: "Tensor") -> "Tensor":
        return encode_image(pipeline.vae, pixels)

    def decodable(self, latents: "Tensor") -> "Tensor":
        return latents[:, :, 0]

    def predict(self, transformer: "nn.Module", noisy: "Tensor", levels: "Tensor", batch: Batch) -> "Tensor":
        import torch

        prompt = batch["prompt_embeds"]
        rows, columns = noisy.shape[3] // PATCH, noisy.shape[4] // PATCH
        # An image token's position is (0, row, column); text has none.
        grid = torch.meshgrid(torch.arange(1), torch.arange(rows), torch.arange(columns), indexing="ij")
        positions = torch.stack(grid, dim=-1).reshape(rows * columns, 3).to(noisy)
        velocity: Tensor = transformer(
            hidden_states=pack(noisy),
            timestep=levels.to(noisy.dtype),
            guidance=self.guidance_input(transformer, levels, batch),
            pooled_projections=batch["pooled_prompt_embeds"],
            encoder_hidden_states=prompt,
            txt_ids=noisy.new_zeros(prompt.shape[1], 3),
            img_ids=positions,
            return_dict=False,
        )[0]
        return unpack(velocity, noisy.shape)

    def write_small_pipeline(self, folder: Path, captions: Sequence[str], seed: int) -> None:
        from autotune.families.small.flux1_dev import write_pipeline

        write_pipeline(folder, captions, seed)
