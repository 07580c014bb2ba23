"""What to think of a trained adapter: which layers moved and how far, and whether all numbers are finite."""

import math
from pathlib import Path

from autotune.schema import AdapterVerdict
from autotune.weights import LoraLayer, read_adapter


def judge(adapter: Path, *, last_block: str, base_loss: float | None, adapter_loss: float | None) -> AdapterVerdict:
    """The verdict on an adapter file, with losses that were measured apart. See `Family.last_block`.

    Raises:
        BadWeights: the file cannot be read back.
    """
    norms = {name: update_norm(layer) for name, layer in read_adapter(adapter).layers.items()}
    return AdapterVerdict(
        num_layers=len(norms),
        num_unmoved=sum(norm == 0 and not name.startswith(f"{last_block}.") for name, norm in norms.items()),
        num_not_finite=sum(not math.isfinite(norm) for norm in norms.values()),
        layer_norms={name: norm if math.isfinite(norm) else 0.0 for name, norm in norms.items()},
        base_loss=base_loss,
        adapter_loss=adapter_loss,
    )


def update_norm(layer: LoraLayer) -> float:
    """Frobenius norm of up @ down * alpha / rank, without forming the product: |UD|^2 = <U'U, DD'>."""
    down, up = layer.down.double(), layer.up.double()
    squared = float(((up.T @ up) * (down @ down.T)).sum())
    return math.sqrt(max(squared, 0.0)) * layer.alpha / layer.rank if math.isfinite(squared) else math.nan
