"""Training that begins with an adapter from a file, of any format that is known, instead of a
new one.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.families import ADAPTER_NAME, Family
from autotune.weights import BadWeights, read_adapter


@torch.no_grad()
def start_from(path: Path, transformer: nn.Module, family: Family) -> None:
    """Give the adapter of `transformer` the values of the one in the file.

    Raises InvalidInput or BadWeights as `starting_values`.
    """
    values = starting_values(path, transformer, family)
    for name, parameter in transformer.named_parameters():
        if name in values:
            parameter.copy_(values[name])


def starting_values(path: Path, transformer: nn.Module, family: Family) -> dict[str, Tensor]:
    """The values of the adapter's parameters, by name, that give the update of the adapter in the
    file.

    `transformer` has an adapter, and may be on meta. Another alpha is made up for by the second
    matrix.

    Raises:
        BadWeights: the file is damaged.
        InvalidInput: it holds no adapter, or one of another model, rank or set of layers.
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
