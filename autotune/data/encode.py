"""Encodes a dataset once: captions with the text encoder, pixels with the VAE, both kept in the cache.

What is cached is found by its content, so a changed image is encoded again alone, and the pipeline is loaded only
when something is missing. Samples come from memory where the set is small, from the cache where it is not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from autotune.data.buckets import assign_buckets
from autotune.data.cache import Cache, Tensors
from autotune.data.dataset import Dataset, Item, OnProgress, Problem
from autotune.data.pixels import open_pixels
from autotune.data.recipes import Entry, Identity, Recipe, file_digests, recipe_of
from autotune.errors import AutotuneError, InvalidInput, first_line
from autotune.families import Sample
from autotune.schema import Bucket

if TYPE_CHECKING:
    from torch import Tensor

    from autotune.data.encoders import Encoders

MEMORY_BYTES = 512 * 1024**2
"""Encoded tensors up to this size stay in memory; what is beyond is read from the cache for each batch."""


@dataclass(frozen=True)
class EncodedDataset:
    """All that training needs of a dataset. Reading is safe from several threads."""

    items: tuple[Item, ...]
    bucket_indices: tuple[int, ...]
    """For each item the index of its bucket."""
    problems: tuple[Problem, ...]
    """Items that turned out to be unreadable while encoding; they are not in `items`."""
    recipes: tuple[Recipe, ...]
    cache: Cache
    in_memory: Mapping[str, Tensors] = field(repr=False)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """For each item a number that is equal where pixels have equal shapes, so that they can share a batch."""
        pairs = zip(self.bucket_indices, self.recipes, strict=True)
        signatures = [(bucket, len(recipe.latents)) for bucket, recipe in pairs]
        numbers = {signature: number for number, signature in enumerate(sorted(set(signatures)))}
        return tuple(numbers[signature] for signature in signatures)

    def sample(self, index: int, *, dropped: bool = False) -> Sample:
        """One sample; with `dropped`, conditioned on the empty caption instead of its own.

        Raises:
            AutotuneError: the cache lost the entry since it was made.
            ValueError: `dropped`, but the data was encoded without caption dropout.
        """
        recipe = self.recipes[index]
        prompt = recipe.dropped if dropped else recipe.prompt
        if prompt is None:
            raise ValueError("the data was encoded without caption dropout")
        pixels = {name: self._entry(latents.key)["latents"] for name, latents in recipe.latents.items()}
        return {**self._entry(prompt.key), **pixels}

    def _entry(self, key: str) -> Tensors:
        tensors = self.in_memory.get(key) or self.cache.read(key)
        if tensors is None:
            raise AutotuneError(
                f"the cache in {self.cache.folder} lost an entry during the run",
                hint="run again with --resume: what is missing is encoded again",
            )
        return tensors


def encode_dataset(
    encoders: "Encoders",
    dataset: Dataset,
    buckets: Sequence[Bucket],
    cache: Cache,
    *,
    caption_dropout: float = 0.0,
    on_progress: OnProgress | None = None,
) -> EncodedDataset:
    """Encode what the cache lacks, and give access to all.

    An item with an unreadable file is left out and named in the result's `problems`.

    Args:
        encoders: loaded only when something is missing; text encoders go as soon as captions are done. Entries that
            others made are never used.
        dataset: what to encode.
        buckets: the shapes images are brought into, as `make_buckets` gives them or as a plan fixes them. Control
            images take the shape of the image they belong to.
        cache: where entries are kept.
        caption_dropout: above 0, the empty caption is encoded too.
        on_progress: called with (done, total) entries; those found in the cache count as done.

    Raises:
        AutotuneError: the disk is full; what is cached so far is kept.
        InvalidInput: no image could be read, or pickled caches of another program lie in the cache's folder.
    """
    cache.refuse_pickles()
    assigned = assign_buckets(dataset, buckets)
    in_buckets = [buckets[index] for index in assigned]
    recipes, problems = _recipes(dataset, in_buckets, encoders.identity, with_empty=caption_dropout > 0)
    entries = {entry.key: entry for recipe in recipes.values() for entry in recipe.entries}
    cache.remove_stale()
    store = _CacheWriter(cache, len(entries), on_progress)
    failed = _complete(encoders, store, entries.values())
    for index, recipe in recipes.items():
        if bad := recipe.keys & failed.keys():
            problems[index] = _broken(dataset.items[index], failed[min(bad)])
    usable = [index for index in recipes if index not in problems]
    if not usable:
        raise InvalidInput(
            f"none of {len(dataset.items)} images could be read: {next(iter(problems.values())).message}",
            hint="`autotune data check DIR` names what is wrong",
        )
    cache.evict(keep={key for index in usable for key in recipes[index].keys})
    return EncodedDataset(
        items=tuple(dataset.items[index] for index in usable),
        bucket_indices=tuple(assigned[index] for index in usable),
        problems=tuple(problems[index] for index in sorted(problems)),
        recipes=tuple(recipes[index] for index in usable),
        cache=cache,
        in_memory=store.in_memory,
    )


def _recipes(
    dataset: Dataset, buckets: Sequence[Bucket], identity: Identity, *, with_empty: bool
) -> tuple[dict[int, Recipe], dict[int, Problem]]:
    """By index of the item, each in its bucket; and what is wrong with those whose files cannot be read."""
    recipes: dict[int, Recipe] = {}
    problems: dict[int, Problem] = {}
    for index, (item, bucket) in enumerate(zip(dataset.items, buckets, strict=True)):
        try:
            recipes[index] = recipe_of(item, bucket, identity, with_empty=with_empty)
        except OSError as error:
            problems[index] = _broken(item, f"cannot be read: {error.strerror}")
    return recipes, problems


def _broken(item: Item, message: str) -> Problem:
    return Problem(file=item.path.name, kind="broken", message=message)


def _complete(encoders: "Encoders", store: "_CacheWriter", entries: Iterable[Entry]) -> dict[str, str]:
    """Find or make every entry; why those failed whose files are damaged, by key."""
    missing = [entry for entry in entries if not store.load(entry.key)]
    encode = partial(_encode, encoders)
    failed = _encode_each([entry for entry in missing if entry.caption is not None], encode, store)
    encoders.release_text()
    return failed | _encode_each([entry for entry in missing if entry.caption is None], encode, store)


class _Unreadable(Exception):
    """A file that an entry is made from cannot be decoded."""


def _encode_each(wanted: Sequence[Entry], encode: Callable[[Entry], Sample], store: "_CacheWriter") -> dict[str, str]:
    import torch

    failed: dict[str, str] = {}
    for number, entry in enumerate(wanted, start=1):
        try:
            with torch.no_grad():
                encoded = encode(entry)
        except _Unreadable as error:
            failed[entry.key] = str(error)
            store.advance()
        else:
            _require_finite(entry, encoded)
            store.add(entry.key, encoded, num_left=len(wanted) - number)
    return failed


def _require_finite(entry: Entry, encoded: Sample) -> None:
    """Raise AutotuneError rather than cache what would make every loss a NaN, long after."""
    import torch

    if not all(torch.isfinite(tensor).all() for tensor in encoded.values()):
        raise AutotuneError(
            f"the model encodes the {entry.what} into numbers that are not finite",
            hint="download its VAE and text encoders again, or plan with --pin precision=fp32",
        )


def _encode(encoders: "Encoders", entry: Entry) -> Sample:
    """Files are opened first: nothing is loaded for those that are broken, which are tried in every start."""
    family, pixels = encoders.model.family, _open(entry)
    pipeline = encoders.pipeline(with_text=entry.caption is not None)
    try:
        if entry.caption is None:
            return {"latents": family.encode_pixels(pipeline, pixels[0].to(pipeline.vae.device))}
        return family.encode_caption(pipeline, entry.caption, pixels)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        what = f"the model cannot encode the {entry.what}: {first_line(error)}"
        raise InvalidInput(what, hint="are its configurations those that were published? Download it again") from error


def _open(entry: Entry) -> "list[Tensor]":
    """The pixels of an image or a clip, or of each control image.

    Raises:
        _Unreadable: a file cannot be decoded.
        AutotuneError: a file is another by now: under the entry's key its pixels would be wrong for good.
    """
    files = [entry.paths] if entry.caption is None else [(path,) for path in entry.paths]
    try:
        pixels = [open_pixels(paths, entry.bucket.width_px, entry.bucket.height_px) for paths in files]
        unchanged = file_digests(entry.paths) == entry.digests
    except Exception as error:  # decoders raise anything for damaged files
        raise _Unreadable(f"cannot be decoded: {error}") from error
    if not unchanged:
        raise AutotuneError(
            f"{entry.paths[0]} changed while the data was encoded",
            hint="run again when nothing writes there any more: what is cached so far is kept",
        )
    return pixels


class _CacheWriter:
    """Finds and adds entries, counts them as progress, and keeps the first `MEMORY_BYTES` of them in memory."""

    def __init__(self, cache: Cache, num_entries: int, on_progress: OnProgress | None) -> None:
        self.in_memory: dict[str, Tensors] = {}
        self._cache = cache
        self._free_bytes = MEMORY_BYTES
        self._num_entries = num_entries
        self._done = 0
        self._on_progress = on_progress

    def load(self, key: str) -> bool:
        """Whether the cache holds an undamaged entry."""
        tensors = self._cache.read(key)
        if tensors is not None:
            self._keep(key, tensors)
        return tensors is not None

    def add(self, key: str, tensors: Mapping[str, "Tensor"], *, num_left: int) -> None:
        """Store a new entry; `num_left` more of its kind are to come."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._cache.require_space(self._cache.write(key, plain) * num_left)
        self._keep(key, plain)

    def _keep(self, key: str, tensors: Tensors) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size <= self._free_bytes:
            self.in_memory[key] = tensors
            self._free_bytes -= size
        self.advance()

    def advance(self) -> None:
        self._done += 1
        if self._on_progress:
            self._on_progress(self._done, self._num_entries)
