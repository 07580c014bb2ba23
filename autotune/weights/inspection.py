"""Describe safetensors files: tensors, metadata, and how many values are not finite. Reads a
tensor at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.plan.base import Frozen, NaturalInt
from autotune.system.lazy import lazy_module
from autotune.weights.files import TensorEntry, WeightFile, open_weights
from autotune.weights.loaders import read_tensor

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

PIECE_ELEMENTS = 1 << 22
"""Values that are checked at a time, so that widening fp8 to check it takes little memory."""


class TensorSummary(Frozen):
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's name, e.g. `BF16`."""
    shape: tuple[int, ...]
    size_bytes: int = NaturalInt
    num_nan: int | None = None
    """Number of NaN values; None if values were not read."""
    num_inf: int | None = None
    """Number of infinite values; None if values were not read."""


class FileSummary(Frozen):
    """A safetensors file, or the shards of a model.

    Example:
        >>> summary = autotune.inspect_weights("pytorch_lora_weights.safetensors")
        >>> summary.size_bytes, [(tensor.name, tensor.shape) for tensor in summary.tensors]
    """

    name: str
    """Name of the file, the index or the folder, without its parent folders."""
    size_bytes: int = NaturalInt
    metadata: dict[str, str]
    tensors: tuple[TensorSummary, ...]

    @property
    def num_nonfinite(self) -> int | None:
        """Number of NaN and infinite values of all tensors, None if values were not read."""
        counted = [tensor for tensor in self.tensors if tensor.num_nan is not None]
        total = sum((tensor.num_nan or 0) + (tensor.num_inf or 0) for tensor in counted)
        return total if counted or not self.tensors else None


def inspect_file(
    path: Path, *, values: bool = True, on_progress: Callable[[int, int], None] | None = None
) -> FileSummary:
    """Describe a file, or the model whose folder or index it is; without `values` only headers are
    read, instantly.

    `on_progress` is called with the bytes done and in all. Holds one tensor in memory. Raises what
    `sources.open_weights` raises.
    """
    source = open_weights(path)
    total, done, summaries = sum(entry.size_bytes for _, entry in source), 0, []
    for file, entry in source:
        num_nan, num_inf = _count_nonfinite(file, entry) if values else (None, None)
        size = entry.size_bytes
        summaries.append(
            TensorSummary(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                size_bytes=size,
                num_nan=num_nan,
                num_inf=num_inf,
            )
        )
        done += size
        if on_progress:
            on_progress(done, total)
    return FileSummary(
        name=path.absolute().name,
        size_bytes=sum(file.size_bytes for file in source.files),
        metadata=source.metadata,
        tensors=tuple(summaries),
    )


def _count_nonfinite(file: WeightFile, entry: TensorEntry) -> tuple[int, int]:
    if not (entry.torch_dtype.is_floating_point or entry.torch_dtype.is_complex):
        return 0, 0
    num_nan = num_inf = 0
    for piece in read_tensor(file, entry).view(-1).split(PIECE_ELEMENTS):  # type: ignore[no-untyped-call]  # torch's own
        wide = piece.float() if piece.itemsize == 1 else piece  # torch has no isnan for fp8
        num_nan += int(torch.isnan(wide).sum())
        num_inf += int(torch.isinf(wide).sum())
    return num_nan, num_inf
