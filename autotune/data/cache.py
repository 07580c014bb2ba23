"""A folder of encoded tensors: one safetensors file per entry, named by what it was made from.

Entries are written atomically and carry their key and a digest of their tensors, so what an
interruption or a bad disk leaves behind, or a copy under another name, is never trusted. A file's
modification time is the time of its last use.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from autotune.data.dataset import OnProgress
from autotune.data.items import EMPTY_CAPTION, Item, file_digest
from autotune.data.pixels import CENTERING, ClipSpan, UnusableFile, explain_damage, open_mask
from autotune.errors import AutotuneError, InvalidInput, require_free_disk, reraise_disk_full
from autotune.models.resolve import ResolvedModel
from autotune.plan.job import Crop
from autotune.plan.workload import Bucket
from autotune.system.lazy import Tensor, torch
from autotune.weights.files import BadWeights, MissingWeights
from autotune.weights.tensors import load_file, save_file

SIZE_LIMIT_BYTES = 50 * 1024**3
FORMAT = "2"  # version of what an entry holds; with a new one, older entries are never found
STALE_SECONDS = 3600.0  # age above which a temporary file belongs to a writer that died
TOUCH_SECONDS = 60.0  # updating the time of last use at every read would take longer than reading
SAMPLE_BYTES = 1024**2  # of each end of a file: hashing a 16 GB text encoder takes half a minute

CHOOSE_FOLDER = "choose another cache folder with XDG_CACHE_HOME"
MAKE_ROOM = f"free some space, or {CHOOSE_FOLDER}"

Tensors = dict[str, "Tensor"]


def entry_key(kind: str, **parts: object) -> str:
    """Name an entry by `kind` and the SHA-256 of `parts`, what it is made of; runs resume by it."""
    text = json.dumps({"format": FORMAT, "kind": kind, **parts}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"


class Cache:
    """Encoded tensors under one folder. Several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> Tensors | None:
        """Read an entry's tensors; None if it is missing, or damaged, which removes it."""
        path = self._path(key)
        try:
            tensors, metadata = load_file(path)
        except (MissingWeights, OSError):
            return None
        except BadWeights:
            tensors, metadata = {}, {}
        is_whole = tensors and metadata.get("digest") == tensors_digest(tensors)
        if not is_whole or metadata.get("key") != key:
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # a read-only cache works without times of last use
            if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
                os.utime(path)
        return tensors

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> int:
        """Store an entry and return its bytes on disk. Raises AutotuneError, and leaves nothing."""
        plain, path = to_plain(tensors), self._path(key)
        hint = f"{MAKE_ROOM}, then run again: what is cached so far is kept"
        try:
            with reraise_disk_full(self.folder, hint=hint):
                save_file(path, plain, {"key": key, "digest": tensors_digest(plain)})
        except OSError as error:
            message = f"cannot write to the cache folder {self.folder}: {error.strerror}"
            raise AutotuneError(message, hint=CHOOSE_FOLDER) from error
        return path.stat().st_size

    def evict(self, keep: Collection[str]) -> int:
        """Remove the least recently used above the limit, but none of `keep`; return how many."""
        protected = {self._path(key) for key in keep}
        entries = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another process evicts too
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
        total, removed = sum(size for _, size, _ in entries), 0
        for _, size, path in sorted(entries):
            if total <= SIZE_LIMIT_BYTES:
                break
            if path not in protected:
                path.unlink(missing_ok=True)
                total -= size
                removed += 1
        return removed

    def refuse_pickles(self) -> None:
        """Raise InvalidInput if pickled caches lie here: reading one can run any code."""
        found = next(iter(sorted(self.folder.glob("*.pt"))), None)
        if found is not None:
            what = f"{found} is a pickled cache, which is not read: it could run any code"
            hint = "delete the .pt files there and run again: all is encoded anew, as safetensors"
            raise InvalidInput(what, hint=hint)

    def remove_stale(self) -> None:
        for path in self.folder.glob(".*.part"):
            with contextlib.suppress(OSError):  # a read-only cache works with them
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


class MemoryCache(Cache):
    """Encoded tensors in this process's memory: nothing is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._entries: dict[str, Tensors] = {}

    def read(self, key: str) -> Tensors | None:
        return self._entries.get(key)

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> int:
        self._entries[key] = to_plain(tensors)
        return 0

    def evict(self, keep: Collection[str]) -> int:
        return 0


def to_plain(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors to the CPU, contiguous and without gradients, where they are not so already."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of names, dtypes, shapes and bytes, in hex."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class EncoderIdentity:
    """All that decides the results of encoders: code, weights, precision, versions."""

    text_encoder: str
    vae: str


def digest_components(model_folder: Path, prefixes: tuple[str, ...]) -> str:
    """Compute the SHA-256 of components' files, by their sizes and both ends of each, in hex."""
    digest = hashlib.sha256()
    for path in sorted(model_folder.glob("*/**/*")):
        name = path.relative_to(model_folder).as_posix()
        if name.startswith(prefixes) and path.is_file():
            size = path.stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read())
    return digest.hexdigest()


@dataclass(frozen=True)
class CacheEntry:
    """An encoded caption, or the encoded pixels of one image or clip."""

    key: str
    paths: tuple[Path, ...]  # of the pixels, or control images for an edit model's text encoder
    digests: tuple[str, ...]  # SHA-256 of each of these files, as the key contains them
    bucket: Bucket  # shape that the files are resized to
    caption: str | None = None
    span: ClipSpan | None = None
    crop: Crop = "center"
    flipped: bool = False

    def __str__(self) -> str:
        if self.caption is None:
            return f"pixels of {self.paths[0]}"
        return f"caption {self.caption[:80]!r}"


@dataclass(frozen=True)
class ItemEntries:
    """All cache entries of one item."""

    prompts: tuple[CacheEntry, ...]
    empty_prompt: CacheEntry | None  # None unless captions may be dropped
    prior_prompts: tuple[CacheEntry, ...]  # empty unless the base's predictions are preserved
    latents: Mapping[str, CacheEntry]  # by name in the sample: `latents`, `control_latents_1` ...
    flipped_latents: Mapping[str, CacheEntry]  # empty unless images may be flipped
    mask_key: str | None = None

    @property
    def all(self) -> tuple[CacheEntry, ...]:
        empty = (self.empty_prompt,) if self.empty_prompt else ()
        latents = (*self.latents.values(), *self.flipped_latents.values())
        return (*self.prompts, *empty, *self.prior_prompts, *latents)

    @cached_property
    def keys(self) -> frozenset[str]:
        keys = frozenset(entry.key for entry in self.all)
        return keys | {self.mask_key} if self.mask_key else keys


def make_item_entries(
    item: Item,
    bucket: Bucket,
    identity: EncoderIdentity,
    *,
    with_empty: bool,
    with_prior: bool = False,
    with_flipped: bool = False,
    digest: Callable[[Path], str] = file_digest,
) -> ItemEntries:
    """Make the entries of one item in the shape of `bucket`. Raises OSError."""
    others = (EMPTY_CAPTION,) * with_empty, item.prior_captions * with_prior
    prompts, empty, priors = (
        tuple(make_prompt_entry(one, item.control_paths, bucket, identity) for one in captions)
        for captions in (item.captions, *others)
    )
    own = item.pixel_paths, bucket, identity, digest, item
    latents = {"latents": _make_latents_entry(*own)}
    for number, path in enumerate(item.control_paths, start=1):
        name = f"control_latents_{number}"
        latents[name] = _make_latents_entry((path,), bucket, identity, digest)
    flipped = {"latents": _make_latents_entry(*own, flipped=True)} if with_flipped else {}
    return ItemEntries(prompts, next(iter(empty), None), priors, latents, flipped)


def make_prompt_entry(
    caption: str, control_paths: tuple[Path, ...], bucket: Bucket, identity: EncoderIdentity
) -> CacheEntry:
    """Make the entry of a caption alone, or with control images in the shape of `bucket`."""
    size = (bucket.width_px, bucket.height_px) if control_paths else None
    digests = tuple(map(file_digest, control_paths))
    encoded = {"text": caption, "controls": digests, "size": size}
    key = entry_key("prompt", **encoded, encoder=identity.text_encoder)
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
    """The entry of `item`, or of a control image, which is whole and never mirrored."""
    digests = tuple(map(digest, paths))
    span, crop = (item.span, item.crop) if item else (None, "center")
    key = entry_key(
        "latents",
        files=digests,
        size=(bucket.width_px, bucket.height_px),
        encoder=identity.vae,
        clip=asdict(span) if span else None,
        crop=crop,
        flipped=flipped,
    )
    return CacheEntry(key, paths, digests, bucket, span=span, crop=crop, flipped=flipped)


MEMORY_BYTES = 512 * 1024**2  # of encoded tensors; others are read from the cache for each batch


@dataclass
class EntryStore:
    """Finds, adds and counts entries, and keeps the first `MEMORY_BYTES` in memory."""

    cache: Cache
    num_entries: int
    on_progress: OnProgress | None
    in_memory: dict[str, Tensors] = field(default_factory=dict)
    memory_bytes: int = 0
    num_done: int = 0
    item_seconds: float = 0.0  # typical, to encode a caption and its pixels

    def find(self, entry: CacheEntry, model: ResolvedModel) -> bool:
        tensors = self.cache.read(entry.key)
        if tensors is None or not is_sample_of(model, entry, tensors):
            return False
        self._keep(entry.key, tensors)
        return True

    def add(self, key: str, tensors: Mapping[str, Tensor], *, num_left: int) -> None:
        plain = to_plain(tensors)
        if size := self.cache.write(key, plain):  # 0 where nothing is written
            folder, needed_bytes = self.cache.folder, size * num_left
            require_free_disk(folder, needed_bytes, "what is still to be cached", hint=MAKE_ROOM)
        self._keep(key, plain)

    def _keep(self, key: str, tensors: Tensors) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.memory_bytes + size <= MEMORY_BYTES:
            self.in_memory[key] = tensors
            self.memory_bytes += size
        self.count()

    def count(self) -> None:
        self.num_done += 1
        if self.on_progress:
            self.on_progress(self.num_done, self.num_entries)


def is_sample_of(model: ResolvedModel, entry: CacheEntry, tensors: Tensors) -> bool:
    """Tell if tensors are a sample, which a digest does not: by names, shapes and finite values."""
    prompt = tensors.get("prompt_embeds")
    num_tokens = prompt.shape[0] if prompt is not None and prompt.ndim else 1
    num_controls = 0 if entry.caption is None else len(entry.paths)
    shapes = model.family.sample_shapes(model.config, entry.bucket, num_tokens, num_controls)
    is_pixels = entry.caption is None
    wanted = {name: shape for name, shape in shapes.items() if ("latents" in name) is is_pixels}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return found == wanted and all(tensor.isfinite().all() for tensor in tensors.values())


def find_mask(
    cache: Cache, item: Item, path: Path, bucket: Bucket, size: tuple[int, ...]
) -> tuple[str, Tensor]:
    """Find or make the mask of an item at (height, width) of its latents, and its key; uint8, 255
    where all of the loss counts. `path` is the item's own for its alpha channel."""
    shape, (height, width) = (bucket.width_px, bucket.height_px), size
    is_alpha, digest = path == item.path, file_digest(path)
    key = entry_key("mask", file=digest, alpha=is_alpha, size=shape, latents=size, crop=item.crop)
    if (stored := cache.read(key)) is not None:
        return key, stored["mask"]
    try:
        image = open_mask(path, is_alpha=is_alpha)
        mask = ImageOps.fit(image, shape, centering=CENTERING[item.crop])
    except Exception as error:  # decoders raise anything for damaged files
        raise UnusableFile(f"its mask {path.name}: {explain_damage(error)}") from error
    # The mean over the pixels of each latent.
    tensor = torch.from_numpy(np.array(mask.resize((width, height), Image.Resampling.BOX)))
    cache.write(key, {"mask": tensor})
    return key, tensor
