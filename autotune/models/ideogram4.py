"""Ideogram 4: one stream of text and image in 34 blocks, 13 layers of Qwen3-VL 8B as the text.

Its pipeline has two transformers, which guidance blends: `transformer`, with the text, is the one
that is trained, as by all trainers; `unconditional_transformer` sees the image alone.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotune.models import facts, family, latents
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, torch

MAX_TEXT_TOKENS = 2048  # at which its own code refuses prompts


class Ideogram4(family.Family):
    """Text to image. A token is 2x2 latents, normalized by channel; a prompt has its own length."""

    name = "ideogram-4"
    models, defaults, tiny_config = facts.family_facts(name)
    aliases = {"ideogram": "ideogram-4", "ideogram-v4": "ideogram-4"}
    pipeline_class = "Ideogram4Pipeline"
    transformer_class = "Ideogram4Transformer2DModel"
    components = (*family.COMPONENTS, "unconditional_transformer")
    other_denoisers = ("unconditional_transformer",)
    untrained_files = "uncond"
    latent_px = 16  # the autoencoder's factor of 8, and 2x2 patches
    patch = 1
    latent_channels = ("in_channels", 128)
    prompt_size = (("llm_features_dim", 53248),)
    max_text_tokens = MAX_TEXT_TOKENS
    masks_padding = True
    max_side_px = 2048
    block_lists = ("layers",)
    target_sets = latents.adapted_layers(
        r"layers\.\d+",
        r"attention\.(to_q|to_k|to_v|to_out\.0)",
        r"feed_forward\.w[123]",
        r"adaln_modulation",
    )
    fp16_overflow = "in fp16 its outputs are NaN (examples/dreambooth/README_ideogram4.md, 58eb52c)"
    excluded = {
        "modulation": "its modulation layers hold 3% of the weights",
        "norm_rope": "it rotates halves of a head, where the function rotates neighbors",
    }

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        pipeline = super().load_pipeline(folder, **components)
        stock = pipeline.encode_prompt

        def encode_prompt(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            features, *layout = stock(*args, **options)
            text = features[:, : options["max_sequence_length"]]
            # Of one channel: the pipeline makes zeros of as many for each token of the image.
            return text.to(pipeline.text_encoder.dtype).reshape(len(text), -1, 1), *layout

        pipeline.encode_prompt = encode_prompt
        return pipeline

    def count_text_tokens(
        self, folder: Path, captions: family.Texts, controls: family.Sizes = ()
    ) -> list[int]:
        return _count_tokens(latents.load_tokenizer(folder), captions)

    def encode_caption(
        self, pipeline: Any, caption: str, controls: family.Pixels = ()
    ) -> family.Sample:
        (length,) = _count_tokens(pipeline.tokenizer, [caption])
        size = {"grid_h": 0, "grid_w": 0, "max_sequence_length": length}
        device = pipeline.text_encoder.device
        encoded = pipeline.encode_prompt(prompt=[caption], device=device, **size)
        return {"prompt_embeds": encoded[0].view(length, -1)}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        vae = pipeline.vae
        encoded = vae.encode(pixels[:, 0][None].to(vae.dtype)).latent_dist.mode()[0]
        channels, height, width = encoded.shape
        patches = encoded.to(pixels.dtype).view(channels, height // 2, 2, width // 2, 2)
        patches = patches.permute(2, 4, 0, 1, 3).reshape(4 * channels, height // 2, width // 2)
        mean, variance = (each.view(-1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
        normalized: Tensor = (patches - mean) / (variance + vae.config.batch_norm_eps).sqrt()
        return normalized[:, None]

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        size, channels, _, rows, columns = latents.shape
        patches = latents.view(size, 2, 2, channels // 4, rows, columns).permute(0, 3, 4, 1, 5, 2)
        return patches.reshape(size, channels // 4, 2 * rows, 2 * columns)

    def predict(
        self, transformer: Any, noisy: Tensor, levels: Tensor, batch: family.Batch
    ) -> Tensor:
        from diffusers.models.transformers import transformer_ideogram4 as stock

        prompt, mask = batch["prompt_embeds"], batch.get("prompt_mask")
        (size, _, _, rows, columns), length = noisy.shape, prompt.shape[1]
        grid = torch.cartesian_prod(*(torch.arange(n) for n in (1, rows, columns)))
        text = torch.arange(length)[:, None].expand(length, 3)
        positions = torch.cat([text, grid + stock.IMAGE_POSITION_OFFSET])
        kinds = torch.full((len(positions),), stock.OUTPUT_IMAGE_INDICATOR)
        kinds[:length] = stock.LLM_TOKEN_INDICATOR
        kinds = latents.send(kinds, noisy.device).expand(size, -1)
        segments: Any = _OneSegment()
        if mask is not None:
            own = torch.nn.functional.pad(mask, (0, rows * columns), value=True)
            kinds, segments = kinds * own, torch.where(own, 1, stock.SEQUENCE_PADDING_INDICATOR)
        pad = torch.nn.functional.pad
        velocity: Tensor = transformer(
            hidden_states=pad(noisy.flatten(2).mT, (0, 0, length, 0)),
            timestep=(1 - levels).to(noisy.dtype),
            encoder_hidden_states=pad(prompt, (0, 0, 0, rows * columns)),
            position_ids=latents.send(positions, noisy.device).expand(size, -1, -1),
            segment_ids=segments,
            indicator=kinds,
            return_dict=False,
        )[0]
        # It counts time from noise to image, and so predicts the velocity's negative.
        return -velocity[:, length:].mT.reshape(noisy.shape)

    @contextlib.contextmanager
    def while_sampling(self, pipeline: Any, bucket: Bucket) -> Iterator[None]:
        both = pipeline.transformer, pipeline.unconditional_transformer
        hooks = [
            family.unwrap_model(each).register_forward_pre_hook(_widen, with_kwargs=True)
            for each in both
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def call_options(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: family.Images
    ) -> family.Options:
        usual = super().call_options(pipeline, prompt, bucket, controls)
        (length,) = _count_tokens(pipeline.tokenizer, [prompt])
        return {**usual, "guidance_schedule": None, "max_sequence_length": length}


class _OneSegment:
    # In the place of segments that are all the same, from whose comparison comes a mask that masks
    # nothing, and that some attention backends refuse.

    def unsqueeze(self, _: int) -> Any:
        return self

    def __eq__(self, _: object) -> Any:
        return SimpleNamespace(unsqueeze=lambda _: None)

    __hash__ = None  # type: ignore[assignment]


def _widen(
    module: Any, args: tuple[Any, ...], options: family.Options
) -> tuple[Any, family.Options]:
    """Give the transformer the text of `encode_prompt` as it takes it, and no mask."""
    hidden, text = options["hidden_states"], options["encoder_hidden_states"].flatten(1)
    width = module.config.llm_features_dim
    features = hidden.new_zeros(*hidden.shape[:2], width)
    length = text.shape[1] // width
    features[:, :length] = text[:, : length * width].view(len(text), length, width)
    return args, {**options, "encoder_hidden_states": features, "segment_ids": _OneSegment()}


def _count_tokens(tokenizer: Any, captions: Sequence[str]) -> list[int]:
    prompts = [[{"type": "text", "text": caption}] for caption in captions]
    chats = latents.as_chats(tokenizer, prompts)
    return [len(ids) for ids in tokenizer(chats, add_special_tokens=False)["input_ids"]]
