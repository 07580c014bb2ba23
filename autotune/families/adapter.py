"""Put a LoRA adapter on a transformer: the same way for training, trials and tracing."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autotune.families.base import Family
from autotune.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

ADAPTER_NAME = "default"


def add_adapter(
    family: Family,
    transformer: "nn.Module",
    workload: Workload,
    dtype: "torch.dtype",
    *,
    seed: int = 0,
    lean: bool = True,
) -> list["nn.Parameter"]:
    """Freeze `transformer`, add the workload's LoRA adapter to it, and return its parameters in order.

    The adapter lives in the compute `dtype`: with another one, peft would copy every layer's input into it and keep
    the copy for the backward pass. `seed` decides the initial values (`lora_A` random, `lora_B` zero). Dropout works
    even in a transformer in evaluation mode, as all are trained; `disable_dropout` turns it off. Without `lean`, layers
    compute as peft's do.

    Raises InvalidInput if the family has no target set of that name.
    """
    import torch
    from peft import LoraConfig

    from autotune.families.low_rank import make_lean

    modules = family.target_set(workload.targets)
    config = LoraConfig(
        r=workload.rank,
        lora_alpha=workload.lora_alpha,
        lora_dropout=workload.lora_dropout,
        init_lora_weights=True,
        target_modules=modules if isinstance(modules, str) else list(modules),
    )
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer.add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    if lean:
        make_lean(transformer)
    parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    return parameters


def find_dropout_layers(transformer: "nn.Module") -> list["nn.Module"]:
    """The layers that draw random numbers in a training step: none without an adapter with dropout."""
    from torch import nn

    return [
        module for module in transformer.modules() if isinstance(module, nn.Dropout) and module.training and module.p
    ]


@contextlib.contextmanager
def disable_dropout(transformer: "nn.Module") -> Iterator[None]:
    """Compute with the adapter as it will be used, without dropout."""
    layers = find_dropout_layers(transformer)
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
