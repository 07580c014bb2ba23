"""Encoded samples by index: from memory where the set is small, from the cache where it is not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autotune.errors import AutotuneError
from autotune.families.base import Sample
from autotune.schema import Bucket
from autotune.training.data.cache import Cache, Tensors
from autotune.training.data.dataset import Item, Problem
from autotune.training.data.recipes import Recipe


@dataclass(frozen=True)
class EncodedDataset:
    """All that training needs of a dataset. Reading is safe from several threads."""

    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    bucket_indices: tuple[int, ...]
    """For each item the index of its bucket."""
    problems: tuple[Problem, ...]
    """Items that turned out to be unreadable while encoding; they are not in `items`."""
    recipes: tuple[Recipe, ...]
    cache: Cache
    in_memory: Mapping[str, Tensors] = field(repr=False)

    def __len__(self) -> int:
        return len(self.items)

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
        pixels = {name: self._entry(latents.key)["latents"] for name, latents in recipe.latents}
        return {**self._entry(prompt.key), **pixels}

    def _entry(self, key: str) -> Tensors:
        tensors = self.in_memory.get(key) or self.cache.read(key)
        if tensors is None:
            raise AutotuneError(
                f"the cache in {self.cache.folder} lost an entry during the run",
                hint="run again with --resume: what is missing is encoded again",
            )
        return tensors
