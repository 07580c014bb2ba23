"""Adapters as other programs train them, for tracing: in their precision, and computed by peft's
own passes.
"""

from typing import TYPE_CHECKING

from autotune.families import Family, add_adapter
from autotune.runtime import lazy_module
from autotune.schema import AdapterPractice, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")


def add_adapter_as_practiced(
    family: Family,
    transformer: "nn.Module",
    workload: Workload,
    dtype: "torch.dtype",
    practice: AdapterPractice | None,
) -> None:
    """Add the workload's adapter to a transformer that computes in `dtype`: autotune's own if there
    is no practice.

    peft copies an input to the precision of the adapter. Autocast, which cannot be traced without a
    device, casts the adapter instead; here its weights do that themselves, whenever they are read.
    """
    if practice is None:
        add_adapter(family, transformer, workload, dtype)
        return
    own = torch.float32 if dtype == torch.float32 or practice.precision == "fp32" else dtype
    add_adapter(family, transformer, workload, own, lean=False)
    if practice.autocasts and own != dtype:
        _cast_when_read(transformer, dtype)


def _cast_when_read(transformer: "nn.Module", dtype: "torch.dtype") -> None:
    from peft.tuners.lora import LoraLayer
    from torch.nn.utils import parametrize

    class Cast(nn.Module):
        def forward(self, weight: "torch.Tensor") -> "torch.Tensor":
            return weight.to(dtype)

    layers = [module for module in transformer.modules() if isinstance(module, LoraLayer)]
    for matrix in (
        matrix
        for layer in layers
        for each in (layer.lora_A, layer.lora_B)
        for matrix in each.values()
    ):
        parametrize.register_parametrization(matrix, "weight", Cast(), unsafe=True)
