"""Encodes a dataset once: captions with the text encoder, pixels with the VAE, both kept in the cache.

What is cached is found by its content, so a changed image is encoded again alone, and the pipeline is loaded only
when something is missing.
"""

import gc
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, InvalidInput
from autotune.families.base import Family, Sample
from autotune.schema import Bucket
from autotune.training.data.buckets import assign_buckets
from autotune.training.data.cache import Cache, Tensors, entry_key
from autotune.training.data.dataset import Dataset, Item, OnProgress, Problem, file_digest
from autotune.training.data.pixels import open_pixels

if TYPE_CHECKING:
    from torch import Tensor

MEMORY_BYTES = 512 * 1024**2
"""Encoded tensors up to this size stay in memory; what is beyond is read from the cache for each batch."""

EMPTY_CAPTION = ""
"""What a sample is conditioned on where its caption is dropped."""


@dataclass(frozen=True)
class Identity:
    """What encodes, as far as it decides the result: weights, precision, library version."""

    text_encoder: str
    vae: str


@dataclass(frozen=True)
class _Latents:
    """One entry to make: which files, in which shape."""

    key: str
    paths: tuple[Path, ...]
    bucket: Bucket


@dataclass(frozen=True)
class EncodedDataset:
    """Encoded samples by index. Reading is safe from several threads."""

    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    bucket_indices: tuple[int, ...]
    """For each item the index of its bucket."""
    problems: tuple[Problem, ...]
    """Items that turned out to be unreadable while encoding, left out of `items`."""
    cache: Cache
    caption_keys: Mapping[str, str]
    image_keys: tuple[Mapping[str, str], ...]
    """For each item the cache entry of every tensor that comes from pixels, by its name in the sample."""
    in_memory: Mapping[str, Tensors] = field(repr=False)

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """For each item a number that is equal where samples have equal shapes and can share a batch."""
        signatures = [(bucket, len(keys)) for bucket, keys in zip(self.bucket_indices, self.image_keys, strict=True)]
        order = {signature: number for number, signature in enumerate(sorted(set(signatures)))}
        return tuple(order[signature] for signature in signatures)

    def sample(self, index: int, *, dropped: bool = False) -> Sample:
        """One sample; with `dropped`, conditioned on the empty caption instead of its own.

        Raises:
            AutotuneError: the cache lost the entry since it was made.
        """
        caption = EMPTY_CAPTION if dropped else self.items[index].caption
        pixels = {name: self._entry(key)["latents"] for name, key in self.image_keys[index].items()}
        return {**self._entry(self.caption_keys[caption]), **pixels}

    def _entry(self, key: str) -> Tensors:
        tensors = self.in_memory.get(key) or self.cache.read(key)
        if tensors is None:
            raise AutotuneError(
                f"the cache in {self.cache.folder} lost an entry during the run",
                hint="run again with --resume: what is missing is encoded again",
            )
        return tensors


def encode_dataset(
    family: Family,
    load_pipeline: Callable[[], Any],
    dataset: Dataset,
    buckets: Sequence[Bucket],
    cache: Cache,
    *,
    identity: Identity,
    caption_dropout: float = 0.0,
    extra_captions: Sequence[str] = (),
    release: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    on_progress: OnProgress | None = None,
) -> EncodedDataset:
    """Encode what the cache lacks, and give access to all.

    Args:
        family: how captions and pixels are encoded.
        load_pipeline: called at most once, and only when something is missing. Its `text_encoder*` and `vae` sit on
            the device that encodes.
        dataset: what to encode.
        buckets: the shapes images are brought into, as `make_buckets` gives them or as a plan fixes them.
        cache: where entries are kept.
        identity: what encodes; entries of another identity are never used.
        caption_dropout: above 0, the empty caption is encoded too.
        extra_captions: encoded and cached as well, e.g. for previews.
        release: drop text encoders as soon as captions are done, and all of the pipeline at the end. Without it the
            caller keeps the pipeline as it was loaded.
        memory_bytes: encoded tensors up to this size stay in memory.
        on_progress: called with (done, total) entries; those found in the cache count as done.

    Raises:
        AutotuneError: the disk is full; what is cached so far is kept.
        InvalidInput: no image could be read.
    """
    captions = dict.fromkeys([*(item.caption for item in dataset.items), *extra_captions])
    if caption_dropout > 0:
        captions[EMPTY_CAPTION] = None
    assigned = [buckets[index] for index in assign_buckets(dataset, buckets)]
    wanted, problems = _wanted_latents(dataset, assigned, identity)
    caption_keys = {caption: _caption_key(caption, identity) for caption in captions}
    store = _Store(cache, memory_bytes, len(caption_keys) + sum(len(one) for one in wanted if one), on_progress)
    cache.remove_stale()
    missing_captions = [caption for caption, key in caption_keys.items() if not store.load(key)]
    missing_latents = [
        {name: one for name, one in (latents or {}).items() if not store.load(one.key)} for latents in wanted
    ]
    if missing_captions or any(missing_latents):
        pipeline = load_pipeline()
        _encode_captions(family, pipeline, missing_captions, caption_keys, store)
        if release:
            _release(pipeline, "text_encoder")
        problems |= _encode_latents(family, pipeline, missing_latents, dataset, store)
        if release:
            _release(pipeline, "vae")
        del pipeline
    usable = [index for index in range(len(dataset.items)) if index not in problems]
    if not usable:
        raise InvalidInput(
            f"none of {len(dataset.items)} images could be read: {next(iter(problems.values())).message}",
            hint="`autotune data check DIR` names what is wrong",
        )
    images = tuple({name: one.key for name, one in (wanted[index] or {}).items()} for index in usable)
    cache.evict(keep={*caption_keys.values(), *(key for keys in images for key in keys.values())})
    return EncodedDataset(
        items=tuple(dataset.items[index] for index in usable),
        buckets=tuple(buckets),
        bucket_indices=tuple(buckets.index(assigned[index]) for index in usable),
        problems=tuple(problems[index] for index in sorted(problems)),
        cache=cache,
        caption_keys=caption_keys,
        image_keys=images,
        in_memory=store.in_memory,
    )


class _Store:
    """Finds and keeps entries, counts them as progress, and holds the first `memory_bytes` of them in memory."""

    def __init__(self, cache: Cache, memory_bytes: int, num_entries: int, on_progress: OnProgress | None) -> None:
        self.in_memory: dict[str, Tensors] = {}
        self._cache = cache
        self._free_bytes = memory_bytes
        self._num_entries = num_entries
        self._seen: set[str] = set()
        self._done = 0
        self._on_progress = on_progress

    def load(self, key: str) -> bool:
        """Whether the cache holds an undamaged entry."""
        if key in self._seen:
            return self._advance()
        tensors = self._cache.read(key)
        return tensors is not None and self._keep(key, tensors)

    def add(self, key: str, tensors: Mapping[str, "Tensor"], num_left: int) -> None:
        """Store a new entry; `num_left` more of its kind are to come."""
        if key not in self._seen:
            size = self._cache.write(key, tensors)
            self._cache.require_space(size * num_left)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            self._keep(key, dict(tensors))
        else:
            self._advance()

    def _keep(self, key: str, tensors: Tensors) -> bool:
        self._seen.add(key)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size <= self._free_bytes:
            self.in_memory[key] = tensors
            self._free_bytes -= size
        return self._advance()

    def _advance(self) -> bool:
        self._done += 1
        if self._on_progress:
            self._on_progress(self._done, self._num_entries)
        return True


def _caption_key(caption: str, identity: Identity) -> str:
    return entry_key("prompt", text=caption, encoder=identity.text_encoder)


def _wanted_latents(
    dataset: Dataset, assigned: Sequence[Bucket], identity: Identity
) -> tuple[list[dict[str, _Latents] | None], dict[int, Problem]]:
    """For each item the entries its pixels become; None and a problem where a file cannot be read."""
    wanted: list[dict[str, _Latents] | None] = []
    problems: dict[int, Problem] = {}
    for index, (item, bucket) in enumerate(zip(dataset.items, assigned, strict=True)):
        try:
            wanted.append(
                {name: _Latents(_latents_key(paths, bucket, identity), paths, bucket) for name, paths in _sources(item)}
            )
        except OSError as error:
            wanted.append(None)
            problems[index] = Problem(item.path.name, "broken", f"cannot be read: {error.strerror}")
    return wanted, problems


def _sources(item: Item) -> Iterable[tuple[str, tuple[Path, ...]]]:
    """Name in the sample and files of each tensor that comes from an item's pixels."""
    yield "latents", item.pixel_paths
    for number, path in enumerate(item.control_paths, start=1):
        yield f"control_latents_{number}", (path,)


def _latents_key(paths: Sequence[Path], bucket: Bucket, identity: Identity) -> str:
    digests = [file_digest(path) for path in paths]
    return entry_key("latents", files=digests, size=[bucket.width_px, bucket.height_px], encoder=identity.vae)


def _encode_captions(
    family: Family, pipeline: Any, captions: Sequence[str], keys: Mapping[str, str], store: _Store
) -> None:
    import torch

    for number, caption in enumerate(captions, start=1):
        with torch.no_grad():
            encoded = family.encode_captions(pipeline, [caption])[0]
        store.add(keys[caption], encoded, len(captions) - number)


def _encode_latents(
    family: Family, pipeline: Any, missing: Sequence[Mapping[str, _Latents]], dataset: Dataset, store: _Store
) -> dict[int, Problem]:
    import torch

    problems: dict[int, Problem] = {}
    num_left = sum(len(latents) for latents in missing)
    for index, latents in enumerate(missing):
        for name, one in latents.items():
            num_left -= 1
            try:
                pixels = open_pixels(one.paths, one.bucket.width_px, one.bucket.height_px)
            except Exception as error:  # decoders raise anything for damaged files
                problems[index] = Problem(
                    dataset.items[index].path.name, "broken", f"{name} cannot be decoded: {error}"
                )
                break
            with torch.no_grad():
                encoded = family.encode_pixels(pipeline, pixels.to(pipeline.vae.device))
            store.add(one.key, {"latents": encoded}, num_left)
    return problems


def _release(pipeline: Any, prefix: str) -> None:
    """Let go of the components whose names begin with `prefix`, and give their device memory back."""
    import torch

    for name in [name for name in pipeline.components if name.startswith(prefix)]:
        setattr(pipeline, name, None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


WEIGHT_SAMPLE_BYTES = 1024**2
"""Read from each end of a large file to recognise it: hashing a 16 GB text encoder would cost half a minute."""


def read_identity(model_folder: Path, family: Family, *, settings: str) -> Identity:
    """What encodes, from the files of a pipeline in the diffusers layout.

    Args:
        model_folder: holds `model_index.json` and a folder per component.
        family: its way to encode is part of the identity.
        settings: precision and quantisation of the encoders, e.g. `bf16`.
    """
    base = f"{family.name} {settings} diffusers {version('diffusers')}"
    vae = _components_digest(model_folder, ("vae",))
    text = _components_digest(model_folder, ("text_encoder", "tokenizer", "processor"))
    return Identity(text_encoder=f"{base} transformers {version('transformers')} {text}", vae=f"{base} {vae}")


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
