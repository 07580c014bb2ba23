"""Samples through the stock pipeline around the transformer in training: nothing is held in memory twice.

Prompts are encoded once, before the transformer is loaded: the pipeline runs with its text encoder up to the first
call of a transformer that has a shape but no weights, and what its `encode_prompt` returned is kept. Later the same
pipeline runs without any text encoder and gets these answers back. No family needs code of its own for this.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autotune.errors import AutotuneError, InvalidInput
from autotune.families.adapter import ADAPTER
from autotune.families.resolve import ResolvedModel, build_on_meta
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL.Image import Image

TEXT_ENCODERS = "text_encoder"
"""Components whose names begin so only serve `encode_prompt`."""


@dataclass(frozen=True)
class Shot:
    """One picture to sample, always from the same noise."""

    prompt: str
    bucket: Bucket
    num_steps: int
    seed: int
    control_paths: tuple[Path, ...] = ()


def load_pipeline(model: ResolvedModel, dtype: torch.dtype, device: torch.device, **parts: Any) -> Any:
    """The stock pipeline from the model's folder; `parts` replaces components (None leaves one out)."""
    if model.folder is None:
        raise InvalidInput(
            f"the weights of {model.spec.name} are not on this machine",
            hint=f"download {model.family.hub_id} and pass its folder: --model FOLDER",
        )
    return model.family.load_pipeline(model.folder, torch_dtype=dtype, **parts).to(device)


class _TransformerReached(Exception):
    """The pipeline has encoded all that it needs."""


class Studio:
    """Samples shots: `learn` them first, then `attach` a transformer."""

    def __init__(self, model: ResolvedModel, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.answers: dict[tuple[str, tuple[Path, ...]], list[Any]] = {}
        self.pipeline: Any = None
        self.scale = 1

    def learn(self, shots: Sequence[Shot]) -> None:
        """Encode the prompts of all shots; the text encoders leave memory again."""
        pipeline = load_pipeline(self.model, self.dtype, self.device, transformer=None)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.transformer = self._shape_of_transformer()
        encode = pipeline.encode_prompt
        for shot in shots:
            answers: list[Any] = []

            def recording(*values: Any, _answers: list[Any] = answers, **named: Any) -> Any:
                _answers.append(_moved(encode(*values, **named), torch.device("cpu")))
                return _moved(_answers[-1], self.device)

            pipeline.encode_prompt = recording
            try:
                self._run(pipeline, shot)
            except _TransformerReached:
                self.answers[shot.prompt, shot.control_paths] = answers
            finally:
                pipeline.encode_prompt = encode
        del pipeline
        gc.collect()

    def _shape_of_transformer(self) -> nn.Module:
        shape = build_on_meta(self.model.family, self.model.config).to(self.dtype)
        # A pipeline may take its device from the transformer; a shape has none of its own.
        shape.__class__ = type(type(shape).__name__, (type(shape),), {"device": property(lambda _: self.device)})
        shape.register_forward_pre_hook(_stop)
        return shape  # type: ignore[no-any-return]

    def attach(self, transformer: nn.Module) -> None:
        """Build the pipeline around `transformer`, as it is; the VAE waits on the host between shots."""
        without = {name: None for name in self.model.family.components if name.startswith(TEXT_ENCODERS)}
        self.pipeline = self.model.family.load_pipeline(
            _folder(self.model), torch_dtype=self.dtype, transformer=transformer, **without
        )
        self.pipeline.set_progress_bar_config(disable=True)

    def sample(self, shot: Shot) -> "list[Image]":
        """The frames of one shot. Where memory is short the VAE works in tiles, then the picture is halved."""
        while True:
            try:
                return self._sample(shot)
            except torch.OutOfMemoryError:
                gc.collect()
                torch.cuda.empty_cache()
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

    def _sample(self, shot: Shot) -> "list[Image]":
        answers: Iterator[Any] = iter(self.answers[shot.prompt, shot.control_paths])
        self.pipeline.encode_prompt = lambda *values, **named: _moved(next(answers), self.device)
        self.pipeline.vae.to(self.device)
        try:
            return self._run(self.pipeline, replace(shot, bucket=_scaled(self.model, shot.bucket, self.scale)))
        finally:
            self.pipeline.vae.to("cpu")

    def _run(self, pipeline: Any, shot: Shot) -> "list[Image]":
        from PIL import Image

        controls = [Image.open(path).convert("RGB") for path in shot.control_paths]
        return self.model.family.sample(
            pipeline, shot.prompt, shot.bucket, num_steps=shot.num_steps, seed=shot.seed, controls=controls
        )

    def with_and_without(self, adapter: Path, shots: Sequence[Shot]) -> "list[tuple[Image, Image]]":
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


def _stop(module: nn.Module, inputs: object) -> None:
    raise _TransformerReached


def _folder(model: ResolvedModel) -> Path:
    if model.folder is None:
        raise InvalidInput(f"the weights of {model.spec.name} are not on this machine", hint="pass --model FOLDER")
    return model.folder


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_moved(one, device) for one in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _scaled(model: ResolvedModel, bucket: Bucket, divisor: int) -> Bucket:
    multiple = model.family.size_multiple_px
    side: Callable[[int], int] = lambda px: max(multiple, px // divisor // multiple * multiple)  # noqa: E731
    return bucket.model_copy(update={"width_px": side(bucket.width_px), "height_px": side(bucket.height_px)})


def grid(pairs: "Sequence[tuple[Image, Image]]") -> "Image":
    """One picture: a row per prompt, without the adapter on the left and with it on the right."""
    from PIL import Image

    width, height = (max(side) for side in zip(*(image.size for pair in pairs for image in pair), strict=True))
    sheet = Image.new("RGB", (2 * width, height * len(pairs)))
    for row, pair in enumerate(pairs):
        for column, image in enumerate(pair):
            sheet.paste(image, (column * width, row * height))
    return sheet
