"""RMSNorm, rotary positions and concatenation of queries and keys as one function with a backward
pass of its own.

Stock processors run about a dozen elementwise kernels for each of them, and autograd keeps several
fp32 copies. Here the backward pass starts from the projections as they were before the norm and
computes the rest again, so nothing else is kept; weights of norms are frozen and get no gradient.
There are two sets of kernels: `fused`, which runs plain operations, in place where it can; and
`compiled`, which torch.compile fuses into about one kernel per stream.

With u = x / rms(x), y = w * u and out = R y for a rotation R, and g the gradient of out: the
gradient of y is R^T g, and that of x is (h - u * mean(h * u)) / rms(x) with h = w * R^T g.

Shapes: x (batch, tokens, heads, head size); a table of complex numbers broadcasts against (batch,
tokens, heads, head size / 2), and turns pairs of neighboring channels. All arithmetic is in fp32.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tables = Sequence[Any]
"""For each stream what turns it, in the form that the kernels take; None for one that is not
turned."""


class Kernels(NamedTuple):
    """One way to compute it. Weights, tables and streams are in the order in which streams are
    joined."""

    table: Callable[[Tensor], Any]
    """A complex table in the form that the others take."""
    forward: Callable[[Sequence[Tensor], Sequence[Tensor | None], Tables, float], Tensor]
    """(streams, weights, tables, epsilon) -> normed, turned and joined along the tokens."""
    backward: Callable[
        [Tensor, Sequence[Tensor], Sequence[Tensor | None], Tables, float], list[Tensor]
    ]
    """(gradient, streams, weights, tables, epsilon) -> gradient of each stream."""


class NormRope(torch.autograd.Function):
    """Joined streams of one kind, queries or keys; see `Kernels`. `rounds`: as
    `AttentionLayout.rounds_to_bf16`."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        weights: Any,
        tables: Any,
        epsilon: float,
        rounds: bool,
        *streams: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*streams)
        ctx.how = kernels, weights, tables, epsilon, rounds
        out: Tensor = kernels.forward(streams, weights, tables, epsilon)
        return out.bfloat16().to(out.dtype) if rounds and out.dtype != torch.bfloat16 else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kernels, weights, tables, epsilon, rounds = ctx.how
        (gradient,) = gradients
        if rounds:
            gradient = gradient.bfloat16()
        of_streams = kernels.backward(gradient, ctx.saved_tensors, weights, tables, epsilon)
        return None, None, None, None, None, *of_streams


def _lengths(streams: Sequence[Tensor]) -> list[int]:
    return [stream.shape[1] for stream in streams]


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


def _eager_forward(
    streams: Sequence[Tensor], weights: Any, tables: Tables, epsilon: float
) -> Tensor:
    first, lengths = streams[0], _lengths(streams)
    out = torch.empty(
        first.shape[0], sum(lengths), *first.shape[2:], dtype=first.dtype, device=first.device
    )
    for x, weight, table, target in zip(
        streams, weights, tables, torch.split(out, lengths, dim=1), strict=True
    ):
        y = x * _inverse_rms(x, epsilon)
        if weight is not None:
            y.mul_(weight)
        if table is None:
            target.copy_(y)
        elif out.dtype == torch.float32:
            torch.mul(_as_complex(y), table, out=_as_complex(target))
        else:
            _as_complex(y).mul_(table)
            target.copy_(y)
        del y  # or it would stay while the next is made
    return out


def _eager_backward(
    gradient: Tensor, streams: Sequence[Tensor], weights: Any, tables: Tables, epsilon: float
) -> list[Tensor]:
    found = []
    for g, x, weight, table in zip(
        torch.split(gradient, _lengths(streams), dim=1), streams, weights, tables, strict=True
    ):
        if table is None:
            h = g.to(torch.float32, copy=True)
        else:
            whole = g.float() if g.stride(-1) == 1 else g.float().contiguous()
            h = torch.view_as_real(_as_complex(whole) * table.conj()).flatten(-2)
            del whole
        if weight is not None:
            h.mul_(weight)
        inverse = _inverse_rms(x, epsilon)
        share = (h * x).sum(-1, keepdim=True).mul_(inverse**3).div_(-x.shape[-1])
        found.append(h.mul_(inverse).addcmul_(x.float(), share).to(x.dtype))
        del h
    return found


def _wide(table: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the signs that a rotation gives them, of every channel: compiled
    code reads both in order, where taking every second number of a table would keep it from
    using vector instructions."""
    real = torch.view_as_real(table)
    sines = real[..., 1]
    return real[..., 0].repeat_interleave(2, -1), torch.stack((-sines, sines), dim=-1).flatten(-2)


def _swap_pairs(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)


def _wide_forward(
    streams: Sequence[Tensor], weights: Any, tables: Tables, epsilon: float
) -> Tensor:
    outs = []
    for x, weight, table in zip(streams, weights, tables, strict=True):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
        if weight is not None:
            y = y * weight.float()
        if table is not None:
            y = y * table[0] + _swap_pairs(y) * table[1]
        outs.append(y.to(x.dtype))
    return torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]


def _wide_backward(
    gradient: Tensor, streams: Sequence[Tensor], weights: Any, tables: Tables, epsilon: float
) -> list[Tensor]:
    found = []
    for g, x, weight, table in zip(
        torch.split(gradient, _lengths(streams), dim=1), streams, weights, tables, strict=True
    ):
        h = g.float()
        if table is not None:
            h = h * table[0] + _swap_pairs(h * table[1])
        if weight is not None:
            h = h * weight.float()
        u = x.float()
        inverse = torch.rsqrt(u.square().mean(-1, keepdim=True) + epsilon)
        u = u * inverse
        found.append(((h - u * (h * u).mean(-1, keepdim=True)) * inverse).to(x.dtype))
    return found


@cache
def _compile(function: Any) -> Any:
    return torch.compile(function)  # when it is needed: torch's compiler takes seconds to import


def _compiled_forward(
    streams: Sequence[Tensor], weights: Any, tables: Tables, epsilon: float
) -> Tensor:
    out: Tensor = _compile(_wide_forward)(streams, weights, tables, epsilon)
    return out


def _compiled_backward(
    gradient: Tensor, streams: Sequence[Tensor], weights: Any, tables: Tables, epsilon: float
) -> list[Tensor]:
    found: list[Tensor] = _compile(_wide_backward)(gradient, streams, weights, tables, epsilon)
    return found


KERNELS: dict[str, Kernels] = {
    "fused": Kernels(lambda table: table, _eager_forward, _eager_backward),
    "compiled": Kernels(_wide, _compiled_forward, _compiled_backward),
}
"""By the name of the knob's choice. Only `compiled` takes seconds at its first call, and again
for other shapes."""
