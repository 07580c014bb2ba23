"""LoRA layers in fewer kernels than peft uses, with the same numbers."""

from functools import cache
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


class LowRankSum(torch.autograd.Function):
    """`result + scale * x @ down.T @ up.T`, in place of `result`. Shapes: result (rows, outputs), x
    (rows, inputs), down (rank, inputs), up (outputs, rank)."""

    @staticmethod
    def forward(
        ctx: Any, result: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        narrow = x @ down.t()
        ctx.save_for_backward(x, narrow, down, up)
        ctx.scale = scale
        ctx.mark_dirty(result)
        return result.addmm_(narrow, up.t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, narrow, down, up = ctx.saved_tensors
        of_up = gradient.t() @ narrow
        of_narrow = gradient @ up
        if ctx.scale != 1:
            of_up.mul_(ctx.scale)
            of_narrow.mul_(ctx.scale)
        of_x = of_narrow @ down if ctx.needs_input_grad[1] else None
        return gradient, of_x, of_narrow.t() @ x, of_up, None


def add_low_rank(result: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Apply `LowRankSum`, or compute the same where writing into `result` cannot be."""
    if torch.compiler.is_compiling() or result._is_view():
        return torch.addmm(result, x @ down.t(), up.t(), alpha=scale)
    return LowRankSum.apply(result, x, down, up, scale)  # type: ignore[no-untyped-call, no-any-return]


class LeanLora:
    """In the place of a peft layer's `forward`; see `make_lean`."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = self.active_adapters[0] if len(self.active_adapters) == 1 else None
        is_ordinary = (
            not (args or kwargs or self.disable_adapters or self.merged)
            and name in self.lora_A
            and name not in self.lora_variant
            and self.lora_B[name].bias is None
            and x.dtype == self.lora_A[name].weight.dtype
        )
        if not is_ordinary:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        rows = x.reshape(-1, x.shape[-1])
        result = self.base_layer(rows)  # of rows, it is no view, and so can be written into
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        result = add_low_rank(result, self.lora_dropout[name](rows), down, up, self.scaling[name])
        return result.view(*x.shape[:-1], result.shape[-1])


@cache
def _lean_class(kind: type) -> type:
    return type(f"Lean{kind.__name__}", (LeanLora, kind), {})


def make_lean(transformer: nn.Module) -> None:
    """Give every LoRA layer around a Linear, quantized or not, the forward pass of this module."""
    for module in transformer.modules():
        if not isinstance(module, LoraLayer) or isinstance(module, LeanLora):
            continue
        if isinstance(module.get_base_layer(), nn.Linear):
            kind: Any = type(module)
            module.__class__ = _lean_class(kind)
