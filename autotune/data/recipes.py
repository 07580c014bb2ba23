"""What each item's tensors are made from and by whom, and the cache keys that follow from it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from autotune.data.cache import entry_key
from autotune.data.captions import EMPTY_CAPTION
from autotune.data.dataset import Item, file_digest
from autotune.families import Family
from autotune.schema import Bucket


@dataclass(frozen=True)
class Identity:
    """Who encodes, as far as it decides the result: way of encoding, weights, precision, library versions."""

    text_encoder: str
    vae: str


WEIGHT_SAMPLE_BYTES = 1024**2
"""Read from each end of a large file to recognize it: hashing a 16 GB text encoder would cost half a minute."""


def read_identity(model_folder: Path, family: Family, *, settings: str, text_settings: str = "") -> Identity:
    """What encodes, from the files of a pipeline in the diffusers layout.

    Args:
        model_folder: holds `model_index.json` and a folder per component.
        family: its way to encode is part of the identity.
        settings: dtype of the encoders, e.g. `bfloat16`.
        text_settings: what else decides the values of the text encoder's output, e.g. its quantization.
    """
    base = f"{family.name} {settings} diffusers {version('diffusers')}"
    vae = _components_digest(model_folder, ("vae",))
    text = _components_digest(model_folder, ("text_encoder", "tokenizer", "processor"))
    encoder = f"{base} transformers {version('transformers')} {text} {text_settings}".rstrip()
    return Identity(text_encoder=encoder, vae=f"{base} {vae}")


def _components_digest(model_folder: Path, prefixes: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(model_folder.glob("*/**/*")):
        name = path.relative_to(model_folder).as_posix()
        if name.startswith(prefixes) and path.is_file():
            size = path.stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(WEIGHT_SAMPLE_BYTES))
                file.seek(max(0, size - WEIGHT_SAMPLE_BYTES))
                digest.update(file.read())
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """One entry of the cache: an encoded caption, or the encoded pixels of one image or clip."""

    key: str
    paths: tuple[Path, ...]
    """Of the pixels; of a caption the control images that a text encoder for editing sees with it."""
    digests: tuple[str, ...]
    """Of these files, as the key has them."""
    bucket: Bucket
    """The shape that they are brought into."""
    caption: str | None = None
    """None for pixels."""

    @property
    def what(self) -> str:
        """For people."""
        return f"pixels of {self.paths[0]}" if self.caption is None else f"caption {self.caption[:80]!r}"


@dataclass(frozen=True)
class Recipe:
    """All cache entries of one item."""

    prompt: Entry
    dropped: Entry | None
    """The empty caption, where captions may be dropped."""
    latents: Mapping[str, Entry]
    """By name in the sample: `latents`, and `control_latents_1`, `control_latents_2` ... for its control images."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.prompt, *([self.dropped] if self.dropped else []), *self.latents.values())

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.key for entry in self.entries)


def recipe_of(item: Item, bucket: Bucket, identity: Identity, *, with_empty: bool) -> Recipe:
    """The recipe of one item.

    Raises:
        OSError: one of its files cannot be read.
    """
    sources = {"latents": item.pixel_paths}
    sources |= {f"control_latents_{number}": (path,) for number, path in enumerate(item.control_paths, start=1)}
    return Recipe(
        prompt=prompt_of(item.caption, item.control_paths, bucket, identity),
        dropped=prompt_of(EMPTY_CAPTION, item.control_paths, bucket, identity) if with_empty else None,
        latents={name: _latents_of(paths, bucket, identity) for name, paths in sources.items()},
    )


def prompt_of(caption: str, control_paths: tuple[Path, ...], bucket: Bucket, identity: Identity) -> Entry:
    """A caption alone, or with control images in the shape of `bucket`."""
    size = _size(bucket) if control_paths else None
    encoder, controls = identity.text_encoder, file_digests(control_paths)
    key = entry_key("prompt", text=caption, controls=controls, size=size, encoder=encoder)
    return Entry(key, control_paths, controls, bucket, caption)


def _latents_of(paths: tuple[Path, ...], bucket: Bucket, identity: Identity) -> Entry:
    digests = file_digests(paths)
    key = entry_key("latents", files=digests, size=_size(bucket), encoder=identity.vae)
    return Entry(key, paths, digests, bucket)


def _size(bucket: Bucket) -> tuple[int, int]:
    return bucket.width_px, bucket.height_px


def file_digests(paths: Sequence[Path]) -> tuple[str, ...]:
    """SHA-256 of each file."""
    return tuple(file_digest(path) for path in paths)
