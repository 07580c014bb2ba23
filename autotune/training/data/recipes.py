"""What each item's tensors are made from, and the cache keys that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autotune.schema import Bucket
from autotune.training.data.cache import entry_key
from autotune.training.data.dataset import Item, file_digest
from autotune.training.data.identity import Identity

EMPTY_CAPTION = ""
"""What a sample is conditioned on where its caption is dropped."""


@dataclass(frozen=True)
class Prompt:
    """An encoded caption, together with the control images that a text encoder for editing sees."""

    key: str
    caption: str
    control_paths: tuple[Path, ...]
    bucket: Bucket | None
    """The shape its control images are brought into; None without any."""


@dataclass(frozen=True)
class Latents:
    """Encoded pixels of one image or clip in the shape of a bucket."""

    key: str
    paths: tuple[Path, ...]
    bucket: Bucket


@dataclass(frozen=True)
class Recipe:
    """All cache entries of one item."""

    prompt: Prompt
    dropped: Prompt | None
    """The empty caption, where captions may be dropped."""
    latents: tuple[tuple[str, Latents], ...]
    """By name in the sample: `latents`, and `control_latents_1`, `control_latents_2` ... for its control images."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """One or two."""
        return (self.prompt,) if self.dropped is None else (self.prompt, self.dropped)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Of all entries."""
        return frozenset({one.key for one in self.prompts} | {one.key for _, one in self.latents})


def recipe_of(item: Item, bucket: Bucket, identity: Identity, *, with_empty: bool) -> Recipe:
    """The recipe of one item.

    Raises:
        OSError: one of its files cannot be read.
    """
    sources = [("latents", item.pixel_paths)]
    sources += [(f"control_latents_{number}", (path,)) for number, path in enumerate(item.control_paths, start=1)]
    return Recipe(
        prompt=prompt_of(item.caption, item.control_paths, bucket, identity),
        dropped=prompt_of(EMPTY_CAPTION, item.control_paths, bucket, identity) if with_empty else None,
        latents=tuple((name, _latents_of(paths, bucket, identity)) for name, paths in sources),
    )


def prompt_of(caption: str, control_paths: tuple[Path, ...], bucket: Bucket | None, identity: Identity) -> Prompt:
    """A caption alone, or with control images in the shape of `bucket`."""
    shape = bucket if control_paths else None
    key = entry_key(
        "prompt",
        text=caption,
        controls=_digests(control_paths),
        size=_size(shape) if shape else None,
        encoder=identity.text_encoder,
    )
    return Prompt(key, caption, control_paths, shape)


def _latents_of(paths: tuple[Path, ...], bucket: Bucket, identity: Identity) -> Latents:
    key = entry_key("latents", files=_digests(paths), size=_size(bucket), encoder=identity.vae)
    return Latents(key, paths, bucket)


def _size(bucket: Bucket) -> tuple[int, int]:
    return bucket.width_px, bucket.height_px


def _digests(paths: Sequence[Path]) -> list[str]:
    return [file_digest(path) for path in paths]
