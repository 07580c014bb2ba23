"""RMSNorm, rotary positions and concatenation of queries and keys, as one function with its
gradient.

Stock processors run about a dozen elementwise kernels for each of them, and autograd keeps several
fp32 copies. Here the backward pass starts from the projections as they were before the norm and
computes the rest again, so nothing else is kept; weights of norms are frozen and get no gradient.
`fused` kernels run plain operations, in place where they can; torch.compile fuses `compiled` ones
into about one kernel per stream.

With u = x / rms(x), y = w * u and out = R y for a rotation R, and g the gradient of out: the
gradient of y is R^T g, and that of x is (h - u * mean(h * u)) / rms(x) with h = w * R^T g.

Shapes: x (batch, tokens, heads, head size); a table of complex numbers broadcasts against (batch,
tokens, heads, head size / 2), and turns pairs of neighboring channels. All arithmetic is in fp32.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from autotune.models.facts import AttentionLayout, Rotary, Stream

Streams = Sequence[Tensor]
Tables = Sequence[Any]  # for each stream what turns it, as the kernels take it, or None


class Kernels(NamedTuple):
    """One way to compute it; all sequences are in the order in which streams are joined."""

    table: Callable[[Tensor], Any]  # a complex table in the form that the others take
    # (streams, weights, tables, epsilon) -> normed, turned and joined along the tokens.
    forward: Callable[[Sequence[Tensor], Sequence[Tensor | None], Tables, float], Tensor]
    # (gradient, streams, weights, tables, epsilon) -> gradient of each stream.
    backward: Callable[
        [Tensor, Sequence[Tensor], Sequence[Tensor | None], Tables, float], list[Tensor]
    ]


class NormRopeFunction(torch.autograd.Function):
    """Joined streams of queries or of keys; `rounds` as `AttentionLayout.rounds_to_bf16`."""

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
        # Weights, too: a checkpoint lets go of what is saved, and a swapped block leaves with them.
        ctx.save_for_backward(*streams, *weights)
        ctx.how = kernels, tables, epsilon, rounds
        out: Tensor = kernels.forward(streams, weights, tables, epsilon)
        return out.bfloat16().to(out.dtype) if rounds and out.dtype != torch.bfloat16 else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kernels, tables, epsilon, rounds = ctx.how
        saved = ctx.saved_tensors  # which a checkpoint gives once
        streams, weights = saved[: len(tables)], saved[len(tables) :]
        (gradient,) = gradients
        if rounds:
            gradient = gradient.bfloat16()
        of_streams = kernels.backward(gradient, streams, weights, tables, epsilon)
        return None, None, None, None, None, *of_streams


def _lengths(streams: Sequence[Tensor]) -> list[int]:
    return [stream.shape[1] for stream in streams]


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))


def _eager_forward(streams: Streams, weights: Any, tables: Tables, epsilon: float) -> Tensor:
    first, lengths = streams[0], _lengths(streams)
    shape = first.shape[0], sum(lengths), *first.shape[2:]
    out = torch.empty(shape, dtype=first.dtype, device=first.device)
    targets = torch.split(out, lengths, dim=1)
    for x, weight, table, target in zip(streams, weights, tables, targets, strict=True):
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
    parts = torch.split(gradient, _lengths(streams), dim=1)
    for g, x, weight, table in zip(parts, streams, weights, tables, strict=True):
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
    """Cosines, and sines with the signs of a rotation, of every channel."""
    real = torch.view_as_real(table)
    sines = real[..., 1]
    return real[..., 0].repeat_interleave(2, -1), torch.stack((-sines, sines), dim=-1).flatten(-2)


def _swap_pairs(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)


def _wide_forward(streams: Streams, weights: Any, tables: Tables, epsilon: float) -> Tensor:
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
    parts = torch.split(gradient, _lengths(streams), dim=1)
    for g, x, weight, table in zip(parts, streams, weights, tables, strict=True):
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


_compile = cache(torch.compile)


def _compiled(function: Any) -> Any:
    def call(*inputs: Any) -> Any:  # when it is needed: the compiler takes seconds to import
        return _compile(function)(*inputs)

    return call


# Only `compiled` takes seconds at its first call, and for other shapes.
KERNELS: dict[str, Kernels] = {
    "fused": Kernels(lambda table: table, _eager_forward, _eager_backward),
    "compiled": Kernels(_wide, _compiled(_wide_forward), _compiled(_wide_backward)),
}


class RotaryTables:
    """The last rotary positions as kernels take them: all blocks of one kind get the same."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] = ()
        self.tables: list[Any] = []

    def get(self, rotary: Rotary, positions: Any, lengths: Sequence[int], name: str) -> list[Any]:
        source = positions[0] if isinstance(positions, tuple) else positions
        key = (name, *lengths)
        if not self.key or self.key[0] is not source or self.key[1:] != key:
            kernels = KERNELS[name]
            found = complex_tables(rotary, positions, lengths)
            self.tables = [None if table is None else kernels.table(table) for table in found]
            self.key = (source, *key)
        return self.tables


def complex_tables(rotary: Rotary, positions: Any, lengths: Sequence[int]) -> list[Tensor | None]:
    """Return each stream's positions as complex numbers; None for one not rotated."""
    if rotary == "streams":
        image, text = positions
        return [text.unsqueeze(1), image.unsqueeze(1)]
    if rotary == "matrix":
        return [torch.view_as_complex(positions[..., 0].contiguous())]
    if rotary == "cos_sin":
        cosines, sines = (part[:, ::2].float() for part in positions)
        table = torch.complex(cosines, sines).unsqueeze(1)
        if len(table) == sum(lengths):
            return list(torch.split(table, list(lengths)))
        return [*[None] * (len(lengths) - 1), table]
    return [positions.unsqueeze(2)]


class JoinedNormRope:
    """Mixed into a stock processor; see `use_kernels`."""

    layout: AttentionLayout
    kernels: str
    tables: RotaryTables
    _attention_backend: Any
    _parallel_config: Any

    def attend(self, attn: nn.Module, image: Tensor, arguments: dict[str, Any]) -> Any:
        """Return what the stock processor returns."""
        layout = self.layout
        text: Tensor | None = arguments.get("encoder_hidden_states")
        names, states = [layout.image], [image]
        is_joined = layout.text is not None and text is not None
        if layout.text is not None and text is not None:
            names, states = [layout.text, layout.image], [text, image]
        attended = states if is_joined or text is None else [text]

        def project(kind: str, inputs: list[Any]) -> list[Tensor]:
            layers = (getattr(attn, getattr(name, kind)) for name in names)
            outs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
            return [out.unflatten(-1, (-1, head_size)) for out in outs]

        head_size = len(getattr(attn, layout.image.query_norm).weight)
        values = project("value", attended)
        value = torch.cat(values, dim=1) if is_joined else values[0]
        positions = arguments.get(layout.rotary_argument)
        query, key = (
            self._norm_rope(
                [getattr(attn, getattr(name, f"{kind}_norm")) for name in names],
                project(kind, inputs),
                positions,
            )
            for kind, inputs in (("query", states), ("key", attended))
        )
        given = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        mask = _joint_mask(image, arguments)
        out = dispatch_attention_fn(query, key, value, attn_mask=mask, **given)
        out = out.flatten(2, 3).to(query.dtype)
        if not is_joined:
            return _project_out(attn, layout.image, out)
        parts = torch.split(out, _lengths(states), dim=1)
        after = [_project_out(attn, name, part) for name, part in zip(names, parts, strict=True)]
        return after[1], after[0]

    def _norm_rope(self, norms: list[Any], streams: list[Tensor], positions: Any) -> Tensor:
        weights = tuple(norm.weight for norm in norms)
        # Code is compiled for training steps alone: previews have shapes of their own.
        name = self.kernels if torch.is_grad_enabled() else "fused"
        tables: list[Any] = [None] * len(streams)
        if positions is not None:
            tables = self.tables.get(self.layout.rotary, positions, _lengths(streams), name)
        rounds = self.layout.rounds_to_bf16 and positions is not None
        # As torch's RMSNorm of fp32.
        epsilon = torch.finfo(torch.float32).eps if norms[0].eps is None else float(norms[0].eps)
        joined: Tensor = NormRopeFunction.apply(  # type: ignore[no-untyped-call]
            KERNELS[name], weights, tables, epsilon, rounds, *streams
        )
        return joined


def _joint_mask(image: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    mask: Tensor | None = arguments.get("attention_mask")
    prompt = arguments.get("encoder_hidden_states_mask")
    if prompt is not None:
        image_mask = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        mask = torch.cat([prompt, image_mask], dim=1)
    return mask[:, None, None, :] if mask is not None and mask.ndim == 2 else mask


def _project_out(attn: nn.Module, names: Stream, out: Tensor) -> Tensor:
    layers = getattr(attn, names.out, None)
    if layers is None:
        return out
    out = out.contiguous()
    for layer in layers if isinstance(layers, nn.ModuleList) else [layers]:
        out = layer(out)
    return out


@cache
def _processor_class(stock: type) -> type:
    signature = inspect.signature(stock.__call__)

    @wraps(stock.__call__)  # modules look at its parameters to see what it takes
    def call(self: Any, attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, attn, hidden_states, *args, **kwargs).arguments
        # A mask made of rotated queries: the stock way.
        if arguments.get("sparse_params") is not None:
            return stock.__call__(self, attn, hidden_states, *args, **kwargs)
        return self.attend(attn, hidden_states, arguments)

    return type(f"NormRope{stock.__name__}", (JoinedNormRope, stock), {"__call__": call})


def use_kernels(transformer: nn.Module, layouts: Sequence[AttentionLayout], name: str) -> None:
    """Let attention modules of `layouts` use these kernels, or diffusers' own for `stock`."""
    by_class = {layout.processor: layout for layout in layouts}
    tables = RotaryTables()
    for module in transformer.modules():
        processor = getattr(module, "processor", None)
        if isinstance(processor, JoinedNormRope):
            processor.__class__ = type(processor).__mro__[2]
        layout = by_class.get(type(processor).__name__)
        if layout is None or name == "stock":
            continue
        if getattr(module, layout.image.query_norm, None) is not None:
            changed: Any = processor
            stock: type = type(processor)
            changed.__class__ = _processor_class(stock)
            changed.layout, changed.kernels, changed.tables = layout, name, tables
