"""Encodes a dataset once: captions with the text encoder, pixels with the VAE, both cached.

Entries are found by content, so a changed image alone is encoded again, and the pipeline is loaded
only if something is missing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotune.data.batches import assign_buckets
from autotune.data.cache import (
    Cache,
    CacheEntry,
    EncoderIdentity,
    EntryStore,
    ItemEntries,
    Tensors,
    digest_components,
    find_mask,
    make_item_entries,
)
from autotune.data.dataset import Dataset, OnProgress
from autotune.data.items import Item, file_digest
from autotune.data.media import Problem
from autotune.data.pixels import explain_damage, open_pixels
from autotune.errors import AutotuneError, InvalidInput, first_line, is_out_of_memory
from autotune.knobs import formats, quantized_layers, settings
from autotune.models.family import DOWN, PRIOR, Sample
from autotune.models.resolve import ResolvedModel
from autotune.plan import candidate, workload
from autotune.system.memory import map_large_buffers, release_memory
from autotune.weights.files import DOWNLOAD_AGAIN, open_weights, weights_digest
from autotune.weights.stream import Transform, cast_as_loaded, load_component


class Encoders:
    """Text encoders and VAE, loaded on first use, for the `device` that trains; `caching` says
    where they run, `precision` is the transformer's."""

    def __init__(
        self,
        model: ResolvedModel,
        caching: candidate.CachingSettings,
        device: torch.device,
        precision: str,
        loader: str = "safetensors",
    ) -> None:
        self.model, self.caching, self.device, self.loader = model, caching, device, loader
        self.dtype = quantized_layers.torch_dtype(settings.encoder_precision(precision))
        self.denoiser_dtype = quantized_layers.torch_dtype(precision)
        self.vae_device = self._device_at(caching.vae_device)
        self._text_device = self._device_at(caching.text_encoder_device)
        self._pipeline: Any = None

    def _device_at(self, place: str) -> torch.device:
        return self.device if place == "training" else torch.device(place)

    @property
    def text_settings(self) -> str:
        """Settings besides the dtype that decide the values of an embedding."""
        name, elsewhere = self.caching.text_encoder_quantization, self._unusual(self._text_device)
        version = formats.WEIGHT_FORMATS[name].storage_version
        return ("" if name == "none" else name) + (f" {version}" if version > 1 else "") + elsewhere

    def _unusual(self, device: torch.device) -> str:
        return "" if device.type == self.device.type else f" on {device.type}"

    @property
    def identity(self) -> EncoderIdentity:
        model, family = self.model, self.model.family
        elsewhere = {
            name: weights_digest(open_weights(path)) for name, path in model.part_files.items()
        }
        dtype = str(self.dtype).removeprefix("torch.")
        base = f"{family.name} {dtype} diffusers {version('diffusers')}"
        others = (family.denoiser, *family.other_denoisers, *family.decoders, "scheduler")
        of_text = (f"{name}/" for name in family.components if name not in others)
        text = f"{digest_components(model.weights, tuple(of_text))} {self.text_settings}"
        encoder = f"{base} transformers {version('transformers')} {text}".rstrip()
        for name, digest in sorted(elsewhere.items()):
            if name != "vae":
                encoder += f" {name} {digest}"
        vae = f"{base} {digest_components(model.weights, ('vae/',))} {elsewhere.get('vae', '')}"
        vae = vae.rstrip() + self._unusual(self.vae_device)
        return EncoderIdentity(text_encoder=encoder, vae=vae)

    def load_pipeline(self, *, with_text: bool = True) -> Any:
        """Load the stock pipeline without transformer, and maybe without text encoders."""
        names = self.model.family.text_encoders  # which only serve `encode_prompt`
        # Beside text encoders the VAE is where the pipeline works: it may see control images.
        vae_device = self.device if with_text else self.vae_device
        if self._pipeline is None or (with_text and getattr(self._pipeline, names[0]) is None):
            parts = {name: self._load_text_encoder(name) if with_text else None for name in names}
            parts |= dict.fromkeys((self.model.family.denoiser, *self.model.family.other_denoisers))
            parts["vae"] = self.load_vae(vae_device)
            pipeline = self.build_pipeline(torch_dtype=self.dtype, **parts)
            pipeline.encode_prompt = self._run_beside(pipeline.encode_prompt)
            self._pipeline = pipeline
        self._pipeline.vae.to(vae_device)
        return self._pipeline

    def _run_beside(self, encode_prompt: Callable[..., Any]) -> Callable[..., Any]:
        # On the text encoders' device; what comes out is on ours.
        def run(*args: Any, **kwargs: Any) -> Any:
            device = self._text_device
            args, kwargs = move_tensors((args, {**kwargs, "device": device}), device)
            return move_tensors(encode_prompt(*args, **kwargs), self.device)

        return run

    def build_pipeline(self, **parts: Any) -> Any:
        """Build the stock pipeline with these components. Raises InvalidInput for damaged files."""
        folder = self.model.weights
        try:
            return self.model.family.load_pipeline(folder, **parts)
        except Exception as error:  # tokenizers and schedulers raise anything for damaged files
            if is_out_of_memory(error):
                raise
            message = f"the pipeline in {folder} does not load: {first_line(error)}"
            raise InvalidInput(message, hint=DOWNLOAD_AGAIN) from error

    def load_vae(self, device: torch.device) -> nn.Module:
        """Return the pipeline's VAE if it is loaded, or else a new one on `device`."""
        loaded: nn.Module | None = getattr(self._pipeline, "vae", None)
        return self._load("vae", device) if loaded is None else loaded

    def _load_text_encoder(self, name: str) -> nn.Module:
        if self.caching.text_encoder_streamed:
            return self.load_streamed(name, self.dtype)

        def quantize(model: nn.Module) -> Transform | None:
            lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
            blocks = (block for each in lists for block in each)  # those of any encoder
            return quantized_layers.quantize_inside(blocks, self.caching.text_encoder_quantization)

        return self._load(name, self._text_device, transform=quantize)

    def _load(self, name: str, device: torch.device, **options: Any) -> nn.Module:
        component: nn.Module = load_component(
            self.model.weights,
            name,
            dtype=self.dtype,
            device=str(device),
            loader=self.loader,
            weights=self.model.part_files.get(name),
            **options,
        )
        return component

    def load_streamed(self, name: str, dtype: torch.dtype) -> nn.Module:
        """Load a component whose layers come to the device, in `dtype`, when they are called."""
        from accelerate import cpu_offload

        # Memory-mapped as stored, so that the host can drop pages that it has no room for.
        weights = self.model.part_files.get(name)
        component: nn.Module = load_component(
            self.model.weights, name, dtype=dtype, weights=weights, casts=False
        )
        cpu_offload(component, self.device, offload_buffers=True)
        cast_as_loaded(component, dtype)  # on meta: layers' weights turn to what stands there
        return with_device(component, self.device)

    def release(self) -> None:
        if self.caching.residency == "release":
            self._pipeline = None
            release_memory()

    def release_text(self) -> None:
        if self.caching.residency == "release" and self._pipeline is not None:
            for name in self.model.family.text_encoders:
                setattr(self._pipeline, name, None)
            release_memory()


def with_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Let a model on meta tell the device that it computes on, where pipelines put its inputs."""
    kind = type(model)
    # transformers looks up by a class's full name what it can record.
    own = {"device": property(lambda _: device), "__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (kind,), own)
    return model


def move_tensors(value: Any, device: torch.device) -> Any:
    """Move tensors to `device`, inside tuples, lists and dictionaries too."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


@dataclass(frozen=True)
class EncodedDataset:
    """All that training needs of a dataset. Reading is safe from several threads."""

    items: tuple[Item, ...]
    bucket_indices: tuple[int, ...]
    problems: tuple[Problem, ...]  # other items, which turned out to be unreadable while encoding
    entries: tuple[ItemEntries, ...]
    cache: Cache
    in_memory: Mapping[str, Tensors] = field(repr=False)
    masks: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # at latents' size
    mask_floor: float = 0.0  # weight of the loss where a mask is black
    item_seconds: float = 0.0  # typical, to encode an item now; 0 if the cache had all

    @cached_property
    def num_captions(self) -> tuple[int, ...]:
        return tuple(len(entries.prompts) for entries in self.entries)

    @cached_property
    def num_prior_captions(self) -> tuple[int, ...]:
        return tuple(len(entries.prior_prompts) for entries in self.entries)

    @cached_property
    def slider_ends(self) -> tuple[Sample, ...]:
        """The positive and the negative sample of a slider; none of other data."""
        ends = range(2 if self.items[0].slides else 0)
        return tuple(self.sample(0, caption=end, is_prior=True) for end in ends)

    @cached_property
    def _is_weighted(self) -> bool:
        has_masks = any(entries.mask_key for entries in self.entries)
        return has_masks or any(item.weight != 1 for item in self.items)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """For each item a number, equal for pixels of equal shapes, which can share a batch."""
        parts = zip(self.items, self.bucket_indices, self.entries, strict=True)
        shapes = [(bucket, len(entries.latents), item.slides) for item, bucket, entries in parts]
        numbers = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
        return tuple(numbers[shape] for shape in shapes)

    def select(self, is_wanted: Callable[[Item], bool]) -> "EncodedDataset":
        indices = [index for index, item in enumerate(self.items) if is_wanted(item)]
        return replace(
            self,
            items=tuple(self.items[index] for index in indices),
            bucket_indices=tuple(self.bucket_indices[index] for index in indices),
            entries=tuple(self.entries[index] for index in indices),
        )

    def sample(
        self,
        index: int,
        dropped: bool = False,
        caption: int = 0,
        flipped: bool = False,
        is_prior: bool = False,
    ) -> Sample:
        """Read one sample; `dropped` has the empty caption, `is_prior` a caption for which the
        base's prediction is preserved. Raises AutotuneError if it is lost."""
        entries = self.entries[index]
        own = entries.prior_prompts if is_prior else entries.prompts
        prompt = entries.empty_prompt if dropped else own[caption]
        if prompt is None:
            raise ValueError("the data was encoded without caption dropout")
        sources = entries.flipped_latents if flipped else entries.latents
        pixels: Sample = {}
        for name, latents in sources.items():
            read = self._read(latents.key)
            pixels |= read if name == "latents" else {name: read["latents"]}
        if self._is_weighted:
            size = pixels["latents"].shape[-2:]
            pixels["loss_weights"] = self._loss_weights(index, size, flipped=flipped)
        slides = self.items[index].slides
        if is_prior or slides:
            pixels[PRIOR] = torch.ones(())
        if slides < 0:
            pixels[DOWN] = torch.ones(())
        return {**self._read(prompt.key), **pixels}

    def _loss_weights(self, index: int, size: tuple[int, ...], *, flipped: bool) -> Tensor:
        key, weight = self.entries[index].mask_key, self.items[index].weight
        if key is None:
            return torch.full((1, 1, *size), weight)
        mask, floor = self.masks[key], self.mask_floor
        if flipped:
            mask = mask.flip(-1)
        return ((floor + (1 - floor) * mask.float() / 255) * weight)[None, None]

    def _read(self, key: str) -> Tensors:
        tensors = self.in_memory.get(key) or self.cache.read(key)
        if tensors is None:
            what = f"the cache in {self.cache.folder} lost an entry during the run"
            hint = "run again with --resume: what is missing is encoded again"
            raise AutotuneError(what, hint=hint)
        return tensors


def encode_dataset(
    encoders: Encoders,
    dataset: Dataset,
    buckets: Sequence[workload.Bucket],
    cache: Cache,
    *,
    caption_dropout: float = 0.0,
    preserve_prior: float = 0.0,
    flip: bool = False,
    mask_floor: float = 0.0,
    on_progress: OnProgress | None = None,
) -> "EncodedDataset":
    """Encode what the cache lacks, and give access to all; unreadable items are in `problems`.
    `mask_floor` is the weight of the loss where a mask is black. Raises AutotuneError if the disk
    is full, InvalidInput if no image could be read or pickles lie in the cache."""
    cache.refuse_pickles()
    cache.remove_stale()
    bucket_indices = assign_buckets(dataset.items, buckets)
    of_items = [buckets[index] for index in bucket_indices]
    drawn = caption_dropout > 0, preserve_prior > 0, flip
    planned, masks, failures = _plan_entries(encoders, dataset.items, of_items, cache, *drawn)
    needed = {entry.key: entry for of_item in planned.values() for entry in of_item.all}
    store = EntryStore(cache, len(needed), on_progress)
    missing = [entry for entry in needed.values() if not store.find(entry, encoders.model)]
    captions = [entry for entry in missing if entry.caption is not None]
    unreadable = _encode_each(encoders, store, captions)
    encoders.release_text()
    pixels = [entry for entry in missing if entry.caption is None]
    unreadable |= _encode_each(encoders, store, pixels)
    for index, of_item in planned.items():
        if keys := of_item.keys & unreadable.keys():
            failures[index] = unreadable[min(keys)]
    usable = [index for index in planned if index not in failures]
    if not usable:
        why = next(iter(failures.values()))
        what = f"none of {len(dataset.items)} images could be read: {why}"
        raise InvalidInput(what, hint="`autotune data check DIR` names what is wrong")
    cache.evict(keep={key for index in usable for key in planned[index].keys})
    problems = [
        Problem(file=dataset.items[index].path.name, kind="broken", message=failures[index])
        for index in sorted(failures)
    ]
    return EncodedDataset(
        items=tuple(dataset.items[index] for index in usable),
        bucket_indices=tuple(bucket_indices[index] for index in usable),
        problems=tuple(problems),
        entries=tuple(planned[index] for index in usable),
        cache=cache,
        in_memory=store.in_memory,
        masks=masks,
        mask_floor=mask_floor,
        item_seconds=store.item_seconds,
    )


def list_entries(
    encoders: Encoders,
    dataset: Dataset,
    buckets: Sequence[workload.Bucket],
    cache: Cache,
    *,
    caption_dropout: float = 0.0,
    preserve_prior: float = 0.0,
    flip: bool = False,
) -> tuple[tuple[Item, ...], tuple[ItemEntries, ...]]:
    """List items and entries as `encode_dataset` does if all files are whole; loads no model."""
    items, indices = dataset.items, assign_buckets(dataset.items, buckets)
    of_items = [buckets[index] for index in indices]
    drawn = caption_dropout > 0, preserve_prior > 0, flip
    planned, _, _ = _plan_entries(encoders, items, of_items, cache, *drawn)
    return tuple(items[index] for index in planned), tuple(planned.values())


def _plan_entries(
    encoders: Encoders,
    items: Sequence[Item],
    buckets: Sequence[workload.Bucket],
    cache: Cache,
    with_empty: bool,
    with_prior: bool,
    with_flipped: bool,
) -> tuple[dict[int, ItemEntries], dict[str, Tensor], dict[int, str]]:
    planned: dict[int, ItemEntries] = {}
    failures: dict[int, str] = {}
    masks: dict[str, Tensor] = {}
    digest = lru_cache(maxsize=None)(file_digest)  # of a video with many clips once
    identity, model = encoders.identity, encoders.model
    how: Any = {"with_empty": with_empty, "with_prior": with_prior, "with_flipped": with_flipped}
    for index, (item, bucket) in enumerate(zip(items, buckets, strict=True)):
        try:
            entries = make_item_entries(item, bucket, identity, **how, digest=digest)
            if item.mask_path:
                shape = model.family.sample_shapes(model.config, bucket, 1)["latents"][-2:]
                key, mask = find_mask(cache, item, item.mask_path, bucket, shape)
                entries, masks[key] = replace(entries, mask_key=key), mask
        except OSError as error:
            failures[index] = explain_damage(error)
        else:
            planned[index] = entries
    return planned, masks, failures


class _Unreadable(Exception):
    """A file that an entry is made from cannot be decoded."""


def _encode_each(
    encoders: Encoders, store: EntryStore, entries: Sequence[CacheEntry]
) -> dict[str, str]:
    unreadable: dict[str, str] = {}
    seconds: list[float] = []
    for number, entry in enumerate(entries, start=1):
        started = time.monotonic()
        try:
            encoded = _encode(encoders, entry)
        except _Unreadable as error:
            unreadable[entry.key] = str(error)
            store.count()
        else:
            seconds.append(time.monotonic() - started)
            store.add(entry.key, encoded, num_left=len(entries) - number)
    store.item_seconds += median(seconds or [0.0])
    return unreadable


@torch.no_grad()
def _encode(encoders: Encoders, entry: CacheEntry) -> Sample:
    """Encode one entry. Raises _Unreadable if a file cannot be decoded, AutotuneError if
    numbers are not finite: cached, they would make every loss a NaN much later."""
    if entry.caption is None and not entry.paths:  # of a slider: no picture, only noise
        model = encoders.model
        shapes = model.family.sample_shapes(model.config, entry.bucket, 1, 0).items()
        return {name: torch.zeros(shape) for name, shape in shapes if "latents" in name}
    # Files come first: broken ones, met again in every run, must not load the encoders.
    family, pixels = encoders.model.family, _open_files(entry)
    pipeline = encoders.load_pipeline(with_text=entry.caption is not None)
    try:
        if entry.caption is None:
            with map_large_buffers():
                encoded = family.encode_item(pipeline, pixels[0].to(pipeline.vae.device))
        else:
            encoded = family.encode_caption(pipeline, entry.caption, pixels)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        what = f"the model cannot encode the {entry}: {first_line(error)}"
        hint = "download the model again: its configurations may differ from the published ones"
        raise InvalidInput(what, hint=hint) from error
    if not all(tensor.isfinite().all() for tensor in encoded.values()):
        what = f"the model encodes the {entry} into numbers that are not finite"
        hint = "download its VAE and text encoders again, or plan with --pin precision=fp32"
        raise AutotuneError(what, hint=hint)
    return encoded


def _open_files(entry: CacheEntry) -> list[Tensor]:
    groups = [entry.paths] if entry.caption is None else [(path,) for path in entry.paths]
    try:
        size = (entry.bucket.width_px, entry.bucket.height_px)
        pixels = [open_pixels(paths, *size, entry.span, crop=entry.crop) for paths in groups]
        if entry.flipped:
            pixels = [one.flip(-1) for one in pixels]
        has_changed = tuple(map(file_digest, entry.paths)) != entry.digests
    except Exception as error:  # decoders raise anything for damaged files
        raise _Unreadable(explain_damage(error)) from error
    if has_changed:
        what = f"{entry.paths[0]} changed while the data was encoded"
        raise AutotuneError(what, hint="run again once nothing writes there: the cache is kept")
    return pixels
