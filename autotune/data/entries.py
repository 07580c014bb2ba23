"""Which cache entries each item needs: what an entry is made from, which encoder makes it, and
so its key."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from autotune.data.cache import entry_key
from autotune.data.captions import EMPTY_CAPTION
from autotune.data.items import Item, file_digest
from autotune.data.video import ClipSpan
from autotune.models.family import Family
from autotune.plan.job import Crop
from autotune.plan.workload import Bucket
from autotune.weights.files import open_weights, weights_digest

NO_FILES: Mapping[str, Path] = MappingProxyType({})

WEIGHT_SAMPLE_BYTES = 1024**2
"""Read from each end of a large file to recognize it: hashing a 16 GB text encoder would take
half a minute."""


@dataclass(frozen=True)
class EncoderIdentity:
    """Everything about the encoders that decides their results: code, weights, precision and
    library versions."""

    text_encoder: str
    vae: str


def identify_encoders(
    model_folder: Path,
    family: Family,
    *,
    settings: str,
    text_settings: str = "",
    vae_settings: str = "",
    files: Mapping[str, Path] = NO_FILES,
) -> EncoderIdentity:
    """Identify the encoders of a pipeline by its files, in the diffusers layout.

    `settings` is their dtype, e.g. `bfloat16`; `text_settings` and `vae_settings` are what else
    decides their output, e.g. a quantization; `files` are the weights of components that are not in
    that folder.
    """
    elsewhere = {name: weights_digest(open_weights(path)) for name, path in files.items()}
    base = f"{family.name} {settings} diffusers {version('diffusers')}"
    vae = _components_digest(model_folder, ("vae",))
    text = _components_digest(model_folder, ("text_encoder", "tokenizer", "processor"))
    encoder = f"{base} transformers {version('transformers')} {text} {text_settings}".rstrip()
    encoder += "".join(
        f" {name} {digest}" for name, digest in sorted(elsewhere.items()) if name != "vae"
    )
    return EncoderIdentity(
        text_encoder=encoder, vae=f"{base} {vae} {elsewhere.get('vae', '')}".rstrip() + vae_settings
    )


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
class CacheEntry:
    """An encoded caption, or the encoded pixels of one image or clip."""

    key: str
    paths: tuple[Path, ...]
    """Files of the pixels; for a caption, the control images that the text encoder of an edit
    model reads with it."""
    digests: tuple[str, ...]
    """SHA-256 of each of these files, as the key contains them."""
    bucket: Bucket
    """Shape that the files are resized to."""
    caption: str | None = None
    """None for pixels."""
    span: ClipSpan | None = None
    """The part of a video; None for images."""
    crop: Crop = "center"
    flipped: bool = False
    """Whether it is mirrored."""

    def __str__(self) -> str:
        return (
            f"pixels of {self.paths[0]}"
            if self.caption is None
            else f"caption {self.caption[:80]!r}"
        )


@dataclass(frozen=True)
class ItemEntries:
    """All cache entries of one item."""

    prompts: tuple[CacheEntry, ...]
    """One for each of its captions."""
    empty_prompt: CacheEntry | None
    """The empty caption; None unless captions may be dropped."""
    latents: Mapping[str, CacheEntry]
    """By name in the sample: `latents`, and `control_latents_1`, `control_latents_2` ... for its
    control images."""
    flipped_latents: Mapping[str, CacheEntry]
    """The same mirrored; empty unless images may be flipped."""
    mask_key: str | None = None
    """Key of its loss mask, if it has one."""

    @property
    def all(self) -> tuple[CacheEntry, ...]:
        empty = (self.empty_prompt,) if self.empty_prompt else ()
        return (*self.prompts, *empty, *self.latents.values(), *self.flipped_latents.values())

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.key for entry in self.all) | (
            {self.mask_key} if self.mask_key else set()
        )


def make_item_entries(
    item: Item,
    bucket: Bucket,
    identity: EncoderIdentity,
    *,
    with_empty: bool,
    with_flipped: bool = False,
    digest: Callable[[Path], str] = file_digest,
) -> ItemEntries:
    """The entries of one item whose images take the shape of `bucket`.

    `with_empty` adds the empty caption, and `with_flipped` its pixels mirrored. `digest` is
    `file_digest`, which the caller may have remember large files.

    Raises:
        OSError: one of its files cannot be read.
    """
    controls = {
        f"control_latents_{number}": (path,)
        for number, path in enumerate(item.control_paths, start=1)
    }
    return ItemEntries(
        prompts=tuple(
            make_prompt_entry(one, item.control_paths, bucket, identity) for one in item.captions
        ),
        empty_prompt=make_prompt_entry(EMPTY_CAPTION, item.control_paths, bucket, identity)
        if with_empty
        else None,
        latents={
            "latents": _make_latents_entry(item.pixel_paths, bucket, identity, digest, item),
            **{
                name: _make_latents_entry(paths, bucket, identity, digest)
                for name, paths in controls.items()
            },
        },
        flipped_latents={
            "latents": _make_latents_entry(
                item.pixel_paths, bucket, identity, digest, item, flipped=True
            )
        }
        if with_flipped
        else {},
    )


def make_prompt_entry(
    caption: str, control_paths: tuple[Path, ...], bucket: Bucket, identity: EncoderIdentity
) -> CacheEntry:
    """The entry of a caption alone, or with control images in the shape of `bucket`."""
    size = (bucket.width_px, bucket.height_px) if control_paths else None
    digests = tuple(map(file_digest, control_paths))
    key = entry_key(
        "prompt", text=caption, controls=digests, size=size, encoder=identity.text_encoder
    )
    return CacheEntry(key, control_paths, digests, bucket, caption)


def _make_latents_entry(
    paths: tuple[Path, ...],
    bucket: Bucket,
    identity: EncoderIdentity,
    digest: Callable[[Path], str],
    item: Item | None = None,
    *,
    flipped: bool = False,
) -> CacheEntry:
    """The entry for the pixels of `item`, or of one of its control images, which are whole and
    never mirrored."""
    digests = tuple(map(digest, paths))
    span, crop = (item.span, item.crop) if item else (None, "center")
    usual = {
        "clip": None,
        "crop": "center",
        "flipped": False,
    }  # parts that keys have not always had
    parts = {"clip": asdict(span) if span else None, "crop": crop, "flipped": flipped}
    unusual = {name: value for name, value in parts.items() if value != usual[name]}
    size = (bucket.width_px, bucket.height_px)
    key = entry_key("latents", files=digests, size=size, encoder=identity.vae, **unusual)
    return CacheEntry(key, paths, digests, bucket, span=span, crop=crop, flipped=flipped)
