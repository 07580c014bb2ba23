"""The trained adapter: saved under diffusers' keys, and in another format, and judged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidInput
from autotune.models.adapter import ADAPTER_NAME
from autotune.models.family import Family
from autotune.plan.job import AdapterFormat
from autotune.plan.run import AdapterVerdict
from autotune.plan.workload import Workload
from autotune.system.lazy import lazy_module
from autotune.weights.adapters import AdapterInfo, read_adapter, save_adapter, write_adapter
from autotune.weights.files import BadWeights
from autotune.weights.names import LoraLayer

if TYPE_CHECKING:
    from autotune.train.optimizer import AdapterOptimizer

if TYPE_CHECKING:
    from autotune.train.model import TrainingModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")


def start_from(path: Path, transformer: nn.Module, family: Family) -> None:
    """Give the adapter of `transformer` the values of the one in the file."""
    values = starting_values(path, transformer, family)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if name in values:
                parameter.copy_(values[name])


def starting_values(path: Path, transformer: nn.Module, family: Family) -> dict[str, Tensor]:
    """Read values for the adapter's parameters, by name, that give the same update as the file.

    `transformer` may be on meta. Another alpha is made up for by the second matrix. Raises
    BadWeights, or InvalidInput for an adapter of another model, rank or set of layers.
    """
    adapted: dict[str, Any] = {
        name: module
        for name, module in transformer.named_modules()
        if ADAPTER_NAME in getattr(module, "lora_A", ())
    }
    layers = read_adapter(path, adapted, family.transformer_class).layers
    if different := sorted(layers.keys() ^ adapted.keys()):
        whose = "the plan does not adapt" if different[0] in layers else "it does not have"
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        message = f"{path} adapts other layers than the plan: {different[0]}, which {whose}{more}"
        raise InvalidInput(
            message, hint="plan with the adapter's own --targets, for the model that it belongs to"
        )
    values = {}
    for name, layer in layers.items():
        module = adapted[name]
        down, up = module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight
        vectors = module.lora_magnitude_vector
        magnitude = vectors[ADAPTER_NAME].weight if ADAPTER_NAME in vectors else None
        if (layer.magnitude is None) != (magnitude is None):
            kinds = ("a LoRA", "a DoRA") if layer.magnitude is None else ("a DoRA", "a LoRA")
            message = f"{path} is {kinds[0]}, the plan trains {kinds[1]}"
            raise InvalidInput(
                message, hint=f"plan with --adapter {'lora' if layer.magnitude is None else 'dora'}"
            )
        if layer.rank != len(down):
            raise InvalidInput(
                f"{path} has rank {layer.rank}, the plan {len(down)}",
                hint=f"plan --rank {layer.rank}",
            )
        if layer.down.shape != down.shape or layer.up.shape != up.shape:
            raise InvalidInput(
                f"{path} is for another model: {name} differs in shape",
                hint="name that model's adapter",
            )
        scale = layer.alpha / layer.rank / module.scaling[ADAPTER_NAME]
        if not (layer.down.isfinite().all() and layer.up.isfinite().all()):
            raise BadWeights(
                f"{path}: {name} has values that are not finite", hint="take an earlier checkpoint"
            )
        if magnitude is not None and layer.magnitude is not None:
            values[f"{name}.lora_magnitude_vector.{ADAPTER_NAME}.weight"] = (
                layer.magnitude.float().reshape_as(magnitude)
            )
        values[f"{name}.lora_A.{ADAPTER_NAME}.weight"] = layer.down.float()
        values[f"{name}.lora_B.{ADAPTER_NAME}.weight"] = layer.up.float() * scale
    return values


EXPORT_FILE = "{}_lora_weights.safetensors"


def save_trained(
    path: Path,
    model: TrainingModel,
    optimizer: AdapterOptimizer,
    workload: Workload,
    plan_digest: str,
    training_steps: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the adapter's fp32 masters in `dtype`, atomically, with their origin as metadata.

    rsLoRA's scale is written as the alpha that gives it: a LoRA to whoever reads the file.
    """
    dtype = dtype or torch.float32
    from peft.utils import get_peft_model_state_dict

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
    """Write an adapter in another format beside itself; return that file, or its own."""
    if to == "diffusers":
        return adapter
    written = adapter.with_name(EXPORT_FILE.format(to))
    write_adapter(written, read_adapter(adapter), to)
    return written


def judge_adapter(
    adapter: Path, *, last_block: str, base_loss: float | None, adapter_loss: float | None
) -> AdapterVerdict:
    """Tell which layers of an adapter file moved; those below `last_block` may stay zero."""
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
    """Return the norm of up @ down * alpha / rank without the product: |UD|^2 = <U'U, DD'>."""
    down, up = layer.down.double(), layer.up.double()
    squared = float(((up.T @ up) * (down @ down.T)).sum())
    return (
        math.sqrt(max(squared, 0.0)) * layer.alpha / layer.rank
        if math.isfinite(squared)
        else math.nan
    )
