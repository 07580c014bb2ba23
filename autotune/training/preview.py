"""Samples through the stock pipeline around the transformer in training: nothing is held in memory twice.

Prompts are encoded once, before the transformer is loaded: the pipeline runs with its text encoder up to the first
call of a transformer that has a shape but no weights, and what its `encode_prompt` returned is kept, in the cache of
encoded data too. Later the same pipeline runs without any text encoder and gets these answers back. No family needs
code of its own for this.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils import _pytree as pytree

from autotune.atomic import replacing
from autotune.errors import AutotuneError
from autotune.families.adapter import ADAPTER
from autotune.families.resolve import build_on_meta
from autotune.schema import Bucket
from autotune.training.data.cache import Cache, entry_key
from autotune.training.data.recipes import Identity, prompt_of
from autotune.training.encoders import Encoders, moved
from autotune.training.memory import give_back_memory


@dataclass(frozen=True)
class Shot:
    """One picture to sample, always from the same noise."""

    prompt: str
    bucket: Bucket
    num_steps: int
    seed: int
    control_paths: tuple[Path, ...] = ()


class _TransformerReached(Exception):
    """The pipeline has encoded all that it needs."""


class Studio:
    """Samples shots: `learn` them first, then `attach` a transformer."""

    def __init__(self, encoders: Encoders) -> None:
        self.encoders = encoders
        self.model, self.dtype, self.device = encoders.model, encoders.dtype, encoders.device
        self.answers: dict[tuple[str, tuple[Path, ...]], list[Any]] = {}
        self.pipeline: Any = None
        self.scale = 1

    def learn(self, shots: Sequence[Shot], cache: Cache) -> None:
        """Encode the prompts of all shots, or find them in `cache` where such encoders put them."""
        identity, missing = self.encoders.identity, []
        for shot in shots:
            if found := cache.read(_answers_key(shot, identity)):
                self.answers[shot.prompt, shot.control_paths] = _unpacked(found)
            else:
                missing.append(shot)
        if missing:
            self._encode(missing)
        for shot in missing:
            cache.write(_answers_key(shot, identity), _packed(self.answers[shot.prompt, shot.control_paths]))

    def _encode(self, shots: Sequence[Shot]) -> None:
        pipeline = self.encoders.pipeline()
        pipeline.transformer = self._shape_of_transformer()
        encode = pipeline.encode_prompt
        for shot in shots:
            answers: list[Any] = []

            def recording(*values: Any, _answers: list[Any] = answers, **named: Any) -> Any:
                _answers.append(moved(encode(*values, **named), torch.device("cpu")))
                return moved(_answers[-1], self.device)

            pipeline.encode_prompt = recording
            try:
                self._run(pipeline, shot)
            except _TransformerReached:
                self.answers[shot.prompt, shot.control_paths] = answers
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
        """Build the pipeline around `transformer`, as it is; a VAE that is not kept waits on the host between shots."""
        self.pipeline = self.model.family.load_pipeline(
            self.model.weights,
            torch_dtype=self.dtype,
            transformer=transformer,
            vae=self.encoders.vae(torch.device("cpu")),
            **dict.fromkeys(self.encoders.names),
        )

    def sample(self, shot: Shot) -> list[Image.Image]:
        """The frames of one shot. Where memory is short the VAE works in tiles, then the picture is halved."""
        while True:
            with contextlib.suppress(torch.OutOfMemoryError):
                return self._sample(shot)
            give_back_memory()  # outside: the error held what the pass had made
            self._shrink(shot)

    def _shrink(self, shot: Shot) -> None:
        vae = self.pipeline.vae
        if hasattr(vae, "enable_tiling") and not getattr(vae, "use_tiling", True):
            vae.enable_tiling()
        elif min(shot.bucket.width_px, shot.bucket.height_px) // self.scale >= 256:
            self.scale *= 2
        else:
            raise AutotuneError(
                "memory is too short for a preview", hint="train without: set preview_prompts to [] in the plan's job"
            )

    def _sample(self, shot: Shot) -> list[Image.Image]:
        answers: Iterator[Any] = iter(self.answers[shot.prompt, shot.control_paths])
        self.pipeline.encode_prompt = lambda *values, **named: moved(next(answers), self.device)
        self.pipeline.vae.to(self.device)
        try:
            bucket = _scaled(shot.bucket, self.scale, self.model.family.size_multiple_px)
            return self._run(self.pipeline, replace(shot, bucket=bucket))
        finally:
            if self.encoders.caching.residency == "release":
                self.pipeline.vae.to("cpu")

    def _run(self, pipeline: Any, shot: Shot) -> list[Image.Image]:
        controls = [Image.open(path).convert("RGB") for path in shot.control_paths]
        return self.model.family.sample(
            pipeline, shot.prompt, shot.bucket, num_steps=shot.num_steps, seed=shot.seed, controls=controls
        )

    def with_and_without(self, adapter: Path, shots: Sequence[Shot]) -> list[tuple[Image.Image, Image.Image]]:
        """First frames (without, with) of each shot; takes the trained adapter off and loads the file in its place.

        Raises:
            AutotuneError: the pipeline did not take the file.
        """
        self.pipeline.transformer.delete_adapters(ADAPTER)
        without = [self.sample(shot)[0] for shot in shots]
        self.load_adapter(adapter)
        return list(zip(without, (self.sample(shot)[0] for shot in shots), strict=True))

    def load_adapter(self, adapter: Path) -> None:
        """Put an adapter file on the transformer by the pipeline's own loader. Raises AutotuneError where it fails."""
        self.pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name)
        if not self.pipeline.get_active_adapters():
            raise AutotuneError(
                f"{adapter} could not be loaded back", hint="this is a bug in autotune: please report it"
            )


def _answers_key(shot: Shot, identity: Identity) -> str:
    prompt = prompt_of(shot.prompt, shot.control_paths, shot.bucket, identity)
    return entry_key("answers", prompt=prompt.key, size=(shot.bucket.width_px, shot.bucket.height_px))


STRUCTURE = "structure"
"""Name of the entry's tensor that tells, as JSON bytes, how the others make up the answers."""


def _packed(answers: list[Any]) -> dict[str, torch.Tensor]:
    """Nested tuples and lists of tensors and None, as tensors by name."""
    leaves, structure = pytree.tree_flatten(answers)
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
    with replacing(path) as part:
        image.save(part, format="PNG")
