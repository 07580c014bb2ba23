"""The trained adapter: saved under the keys that diffusers loads, and in another format, then
read back and judged.
"""

import math
from pathlib import Path

import torch
from peft.utils import get_peft_model_state_dict

from autotune.families import ADAPTER_NAME
from autotune.schema import AdapterFormat, AdapterVerdict, Workload
from autotune.training.model import TrainingModel
from autotune.training.optimizer import AdapterOptimizer
from autotune.weights import AdapterInfo, LoraLayer, read_adapter, save_adapter, write_adapter

EXPORT_FILE = "{}_lora_weights.safetensors"
"""The same adapter in another format."""


def save_trained(
    path: Path,
    model: TrainingModel,
    optimizer: AdapterOptimizer,
    workload: Workload,
    plan_digest: str,
    training_steps: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the adapter's fp32 master weights in `dtype`, atomically, with where they come from in
    the metadata.

    rsLoRA's scale is written as the alpha that gives it, so that its file is a LoRA to whoever
    reads it.
    """
    masters = dict(zip(map(id, model.adapter), optimizer.masters, strict=True))
    named = {
        name: masters[id(p)].detach().to(dtype)
        for name, p in model.transformer.named_parameters()
        if id(p) in masters
    }
    info = AdapterInfo(
        model=workload.model.name,
        transformer=model.family.transformer_class,
        plan_digest=plan_digest,
        rank=workload.rank,
        alpha=workload.lora_alpha * (workload.rank**0.5 if workload.adapter == "rslora" else 1),
        training_steps=training_steps,
    )
    state = get_peft_model_state_dict(
        model.transformer, state_dict=named, adapter_name=ADAPTER_NAME
    )
    save_adapter(path, state, info, model.family.adapter_component)


def export_trained(adapter: Path, to: AdapterFormat) -> Path:
    """Write an adapter file in another format too, beside itself; returns that file, or the
    adapter's own.
    """
    if to == "diffusers":
        return adapter
    written = adapter.with_name(EXPORT_FILE.format(to))
    write_adapter(written, read_adapter(adapter), to)
    return written


def judge_adapter(
    adapter: Path, *, last_block: str, base_loss: float | None, adapter_loss: float | None
) -> AdapterVerdict:
    """Which layers of an adapter file moved and how far, with losses that the caller measured.

    Layers below `last_block`, see `Family.last_block`, may stay zero.

    Raises:
        BadWeights: the file cannot be read back.
    """
    norms = {name: update_norm(layer) for name, layer in read_adapter(adapter).layers.items()}
    return AdapterVerdict(
        num_layers=len(norms),
        num_unmoved=sum(
            norm == 0 and not name.startswith(f"{last_block}.") for name, norm in norms.items()
        ),
        num_not_finite=sum(not math.isfinite(norm) for norm in norms.values()),
        layer_norms={name: norm if math.isfinite(norm) else 0.0 for name, norm in norms.items()},
        base_loss=base_loss,
        adapter_loss=adapter_loss,
    )


def update_norm(layer: LoraLayer) -> float:
    """Frobenius norm of up @ down * alpha / rank, without forming the product: |UD|^2 = <U'U,
    DD'>.
    """
    down, up = layer.down.double(), layer.up.double()
    squared = float(((up.T @ up) * (down @ down.T)).sum())
    return (
        math.sqrt(max(squared, 0.0)) * layer.alpha / layer.rank
        if math.isfinite(squared)
        else math.nan
    )
