"""Samples through the stock pipeline around the transformer in training: nothing is held in memory twice.

Prompts are encoded once, before the transformer is loaded: the pipeline runs with its text encoder up to the first
call of a transformer that has a shape but no weights, and what its `encode_prompt` returned is kept, in the cache of
encoded data too. Later the same pipeline runs without any text encoder and gets that back. No family needs
code of its own for this.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils import _pytree as pytree

from autotune.data import Cache, Encoders, Identity, entry_key, moved, open_image, prompt_of, to_rgb
from autotune.errors import AutotuneError, InvalidInput, first_line
from autotune.families import ADAPTER_NAME, build_on_meta
from autotune.runtime import atomic_write, is_out_of_memory, release_memory
from autotune.schema import Bucket
from autotune.weights import read_adapter


class PreviewTooLarge(AutotuneError):
    """Memory is too short for a preview, even of the smallest size."""


@dataclass(frozen=True)
class Preview:
    """One picture to sample, always from the same noise."""

    prompt: str
    bucket: Bucket
    num_steps: int
    seed: int
    control_paths: tuple[Path, ...] = ()


class _TransformerReached(Exception):
    """The pipeline has encoded all that it needs."""


class PreviewSampler:
    """Samples previews: `encode_prompts` first, then `attach` a transformer."""

    def __init__(self, encoders: Encoders, on_smaller: Callable[[str], None] = lambda message: None) -> None:
        """`on_smaller` is told where memory is too short for pictures of the asked size."""
        self.encoders, self.on_smaller = encoders, on_smaller
        self.model, self.dtype, self.device = encoders.model, encoders.dtype, encoders.device
        self.encoded: dict[tuple[str, tuple[Path, ...]], list[Any]] = {}
        self.pipeline: Any = None
        self.scale = 1

    def encode_prompts(self, previews: Sequence[Preview], cache: Cache) -> None:
        """Encode the prompts of all previews, or find them in `cache` where such encoders put them."""
        identity, missing = self.encoders.identity, []
        for preview in previews:
            if found := cache.read(_key_of(preview, identity)):
                self.encoded[preview.prompt, preview.control_paths] = _unpacked(found)
            else:
                missing.append(preview)
        if missing:
            self._encode(missing)
        for preview in missing:
            cache.write(_key_of(preview, identity), _packed(self.encoded[preview.prompt, preview.control_paths]))

    def _encode(self, previews: Sequence[Preview]) -> None:
        pipeline = self.encoders.pipeline()
        pipeline.transformer = self._shape_of_transformer()
        encode = pipeline.encode_prompt
        for preview in previews:
            encoded: list[Any] = []

            def recording(*values: Any, _encoded: list[Any] = encoded, **named: Any) -> Any:
                _encoded.append(moved(encode(*values, **named), torch.device("cpu")))
                return moved(_encoded[-1], self.device)

            pipeline.encode_prompt = recording
            try:
                self._run(pipeline, preview)
            except _TransformerReached:
                self.encoded[preview.prompt, preview.control_paths] = encoded
            finally:
                pipeline.encode_prompt = encode
        pipeline.transformer = None

    def _shape_of_transformer(self) -> nn.Module:
        shape = build_on_meta(self.model.family, self.model.config).to(self.dtype)
        # A pipeline may take its device from the transformer; a shape has none of its own.
        shape.__class__ = type(type(shape).__name__, (type(shape),), {"device": property(lambda _: self.device)})
        shape.register_forward_pre_hook(_stop)
        return shape  # type: ignore[no-any-return]

    def attach(self, transformer: nn.Module) -> None:
        """Build the pipeline around `transformer`, as it is; a VAE that is not kept waits on the host meanwhile."""
        self.pipeline = self.model.family.load_pipeline(
            self.model.weights,
            torch_dtype=self.dtype,
            transformer=transformer,
            vae=self.encoders.vae(torch.device("cpu")),
            **dict.fromkeys(self.model.family.text_encoders),
        )

    def sample(self, preview: Preview) -> list[Image.Image]:
        """The frames of one preview. Where memory is short the VAE works in tiles, then the picture is halved.

        Raises:
            PreviewTooLarge: it is too short for the smallest.
        """
        while True:
            try:
                return self._sample(preview)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            release_memory()  # outside: the error held what the pass had made
            self._shrink(preview)

    def _shrink(self, preview: Preview) -> None:
        vae = self.pipeline.vae
        if hasattr(vae, "enable_tiling") and not getattr(vae, "use_tiling", True):
            vae.enable_tiling()
        elif min(preview.bucket.width_px, preview.bucket.height_px) // self.scale >= 256:
            self.scale *= 2
            smaller = _scaled(preview.bucket, self.scale, self.model.family.size_multiple_px)
            self.on_smaller(
                f"memory is too short for a preview of {preview.bucket.width_px}x{preview.bucket.height_px} px: "
                f"it is {smaller.width_px}x{smaller.height_px}"
            )
        else:
            raise PreviewTooLarge(
                "memory is too short for a preview", hint="train without: set preview_prompts to [] in the plan's job"
            )

    def _sample(self, preview: Preview) -> list[Image.Image]:
        encoded: Iterator[Any] = iter(self.encoded[preview.prompt, preview.control_paths])
        self.pipeline.encode_prompt = lambda *values, **named: moved(next(encoded), self.device)
        self.pipeline.vae.to(self.device)
        try:
            bucket = _scaled(preview.bucket, self.scale, self.model.family.size_multiple_px)
            return self._run(self.pipeline, replace(preview, bucket=bucket))
        finally:
            if self.encoders.caching.residency == "release":
                self.pipeline.vae.to("cpu")

    def _run(self, pipeline: Any, preview: Preview) -> list[Image.Image]:
        try:
            controls = [to_rgb(open_image(path)) for path in preview.control_paths]
        except Exception as error:  # decoders raise anything for damaged files
            raise InvalidInput(f"a control image cannot be decoded: {error}", hint="check the files") from error
        return self.model.family.sample(
            pipeline, preview.prompt, preview.bucket, num_steps=preview.num_steps, seed=preview.seed, controls=controls
        )

    def with_and_without(self, adapter: Path, previews: Sequence[Preview]) -> list[tuple[Image.Image, Image.Image]]:
        """First frames (without, with) of each; takes the trained adapter off and loads the file in its place.

        Raises:
            AutotuneError: the pipeline did not take the file.
        """
        self.pipeline.transformer.delete_adapters(ADAPTER_NAME)
        without = [self.sample(preview)[0] for preview in previews]
        self.load_adapter(adapter)
        return list(zip(without, (self.sample(preview)[0] for preview in previews), strict=True))

    def load_adapter(self, adapter: Path) -> None:
        """Put an adapter file on the transformer by the pipeline's own loader.

        Raises:
            BadWeights: the file is damaged.
            InvalidInput: it is no adapter of this model, or has numbers that are not finite.
            AutotuneError: the pipeline did not take it.
        """
        hint = "name the output folder of `autotune train`, or train again"
        for name, layer in read_adapter(adapter).layers.items():
            if not (layer.down.isfinite().all() and layer.up.isfinite().all()):
                raise InvalidInput(f"{adapter}: {name} has numbers that are not finite", hint=hint)
        try:
            self.pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name)
        except Exception as error:  # diffusers and peft raise anything for an adapter of another model
            if is_out_of_memory(error):
                raise
            reason = first_line(error)
            raise InvalidInput(f"{adapter} is no adapter of this model: {reason}", hint=hint) from error
        if not self.pipeline.get_active_adapters():
            raise AutotuneError(
                f"{adapter} could not be loaded back", hint="this is a bug in autotune: please report it"
            )


def _key_of(preview: Preview, identity: Identity) -> str:
    prompt = prompt_of(preview.prompt, preview.control_paths, preview.bucket, identity)
    return entry_key("answers", prompt=prompt.key, size=(preview.bucket.width_px, preview.bucket.height_px))


STRUCTURE = "structure"
"""Name of the entry's tensor that tells, as JSON bytes, how the others make up what was encoded."""


def _packed(encoded: list[Any]) -> dict[str, torch.Tensor]:
    """Nested tuples and lists of tensors and None, as tensors by name."""
    leaves, structure = pytree.tree_flatten(encoded)
    tensors = {str(number): leaf for number, leaf in enumerate(leaves) if leaf is not None}
    text = json.dumps([len(leaves), pytree.treespec_dumps(structure)])
    return {**tensors, STRUCTURE: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _unpacked(tensors: dict[str, torch.Tensor]) -> list[Any]:
    count, structure = json.loads(bytes(tensors[STRUCTURE].tolist()))
    leaves = [tensors.get(str(number)) for number in range(count)]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(structure))  # type: ignore[no-any-return]


def _stop(module: nn.Module, inputs: object) -> None:
    raise _TransformerReached


def _scaled(bucket: Bucket, divisor: int, multiple: int) -> Bucket:
    sides = {"width_px": bucket.width_px, "height_px": bucket.height_px}
    return bucket.model_copy(
        update={name: max(multiple, px // divisor // multiple * multiple) for name, px in sides.items()}
    )


def grid(pairs: Sequence[tuple[Image.Image, Image.Image]]) -> Image.Image:
    """One picture: a row per prompt, without the adapter on the left and with it on the right."""
    width, height = (max(side) for side in zip(*(image.size for pair in pairs for image in pair), strict=True))
    sheet = Image.new("RGB", (2 * width, height * len(pairs)))
    for row, pair in enumerate(pairs):
        for column, image in enumerate(pair):
            sheet.paste(image, (column * width, row * height))
    return sheet


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with atomic_write(path) as part:
        image.save(part, format="PNG")
