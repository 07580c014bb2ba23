"""LoRA and LoKr layers in fewer kernels than peft uses, with the same numbers."""

from functools import cache
from typing import Any

import torch
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


class LowRankSum(torch.autograd.Function):
    """`result + scale * x @ down.T @ up.T`, in place of `result`. Shapes: result (rows, outputs), x
    (rows, inputs), down (rank, inputs) or None, up (outputs, rank); all rows may be in parts."""

    @staticmethod
    def forward(
        ctx: Any, result: Tensor, x: Tensor, down: Tensor | None, up: Tensor, scale: float
    ) -> Tensor:
        narrow = x if down is None else x @ down.t()
        ctx.save_for_backward(x, narrow, down, up)
        ctx.scale = scale
        ctx.mark_dirty(result)
        result.view(-1, len(up)).addmm_(narrow, up.t(), alpha=scale)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, narrow, down, up = ctx.saved_tensors
        of_rows = gradient.reshape(-1, len(up))
        of_up = of_rows.t() @ narrow
        of_narrow = of_rows @ up
        if ctx.scale != 1:
            of_up.mul_(ctx.scale)
            of_narrow.mul_(ctx.scale)
        if down is None:
            return gradient, of_narrow, None, of_up, None
        of_x = of_narrow @ down if ctx.needs_input_grad[1] else None
        return gradient, of_x, of_narrow.t() @ x, of_up, None


def add_low_rank(
    result: Tensor, x: Tensor, down: Tensor | None, up: Tensor, scale: float
) -> Tensor:
    """Apply `LowRankSum`, or compute the same where writing into `result` cannot be."""
    if torch.compiler.is_compiling() or result._is_view():
        narrow, rows = x if down is None else x @ down.t(), result.reshape(-1, len(up))
        return torch.addmm(rows, narrow, up.t(), alpha=scale).view_as(result)
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


class LeanLokr:
    """In the place of a peft layer's `forward`: that makes a whole matrix of each product."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = self.active_adapters[0] if len(self.active_adapters) == 1 else None
        if args or kwargs or self.disable_adapters or self.merged or name not in self.lokr_w1:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        rows = x.reshape(-1, x.shape[-1])
        result = self.base_layer(rows)
        left = self.lokr_w1[name].to(x.dtype)  # (outputs, inputs) of parts
        narrow = rows.reshape(len(rows) * left.shape[1], -1)
        up = (self.lokr_w2 if name in self.lokr_w2 else self.lokr_w2_a)[name].to(x.dtype)
        if name not in self.lokr_w2:
            narrow = narrow @ self.lokr_w2_b[name].to(x.dtype).t()
        parts = narrow.view(len(rows), left.shape[1], -1)
        mixed = torch.bmm(left.expand(len(rows), -1, -1), parts).view(-1, up.shape[1])
        result = add_low_rank(result, mixed, None, up, self.scaling[name])
        return result.view(*x.shape[:-1], result.shape[-1])


@cache
def _lean_class(kind: type) -> type:
    base = LeanLora if issubclass(kind, LoraLayer) else LeanLokr
    return type(f"Lean{kind.__name__}", (base, kind), {})


def make_lean(transformer: nn.Module) -> None:
    """Give every adapted layer around a Linear, also quantized, this module's forward pass."""
    for module in transformer.modules():
        if not isinstance(module, LoraLayer | LoKrLayer) or isinstance(module, LeanLora | LeanLokr):
            continue
        if isinstance(module.get_base_layer(), nn.Linear):
            kind: Any = type(module)
            module.__class__ = _lean_class(kind)
