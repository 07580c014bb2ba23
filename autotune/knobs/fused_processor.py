"""Stock attention processors that norm, turn and join queries and keys by `norm_rope`.

A processor changes its class, to a subclass of its own; so whatever else diffusers keeps on it,
such as the attention backend, stays, and it can change back.
"""

import inspect
from collections.abc import Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from autotune.knobs.fused_norm_rope import KERNELS, Kernels, NormRope
from autotune.models.family import AttentionLayout, Rotary, Stream


class RotaryTables:
    """The last rotary positions in the form that kernels take: all blocks of one kind get the
    same."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] = ()
        self.tables: list[Any] = []

    def get(self, rotary: Rotary, positions: Any, lengths: Sequence[int], name: str) -> list[Any]:
        """For each stream, in the order in which they are joined."""
        source = positions[0] if isinstance(positions, tuple) else positions
        key = (name, *lengths)
        if not self.key or self.key[0] is not source or self.key[1:] != key:
            kernels = KERNELS[name]
            found = complex_tables(rotary, positions, lengths)
            self.tables = [None if table is None else kernels.table(table) for table in found]
            self.key = (source, *key)
        return self.tables


def complex_tables(rotary: Rotary, positions: Any, lengths: Sequence[int]) -> list[Tensor | None]:
    """Positions of each stream as complex numbers that broadcast against (batch, tokens, heads,
    head size / 2); None for one that is not rotated."""
    if rotary == "streams":
        image, text = positions
        return [text.unsqueeze(1), image.unsqueeze(1)]
    if rotary == "matrix":
        return [torch.view_as_complex(positions[..., 0].contiguous())]
    if rotary == "cos_sin":
        cosines, sines = (part[:, ::2].float() for part in positions)
        table = torch.complex(cosines, sines).unsqueeze(1)
        whole = len(table) == sum(lengths)
        return (
            list(torch.split(table, list(lengths)))
            if whole
            else [*[None] * (len(lengths) - 1), table]
        )
    return [positions.unsqueeze(2)]


class JoinedNormRope:
    """Mixed into a stock processor; see `use_kernels`."""

    layout: AttentionLayout
    kernels: str
    tables: RotaryTables
    _attention_backend: Any
    _parallel_config: Any

    def attend(self, attn: nn.Module, image: Tensor, arguments: dict[str, Any]) -> Any:
        """What the stock processor returns."""
        layout = self.layout
        text: Tensor | None = arguments.get("encoder_hidden_states")
        names, states = [layout.image], [image]
        is_joined = layout.text is not None and text is not None
        if layout.text is not None and text is not None:
            names, states = [layout.text, layout.image], [text, image]
        attended = states if is_joined or text is None else [text]

        def project(kind: str, inputs: list[Any]) -> list[Tensor]:
            outs = [
                getattr(attn, getattr(name, kind))(x) for name, x in zip(names, inputs, strict=True)
            ]
            return [out.unflatten(-1, (-1, head_size)) for out in outs]

        head_size = len(getattr(attn, layout.image.query_norm).weight)
        values = project("value", attended)
        value = torch.cat(values, dim=1) if is_joined else values[0]
        positions = arguments.get(layout.rotary_argument)
        query, key = (
            self._norm_rope(
                attn,
                [getattr(name, f"{kind}_norm") for name in names],
                project(kind, inputs),
                positions,
            )
            for kind, inputs in (("query", states), ("key", attended))
        )
        out = (
            self._dispatch(query, key, value, _joint_mask(image, arguments))
            .flatten(2, 3)
            .to(query.dtype)
        )
        if not is_joined:
            return _project_out(attn, layout.image, out)
        parts = torch.split(out, [part.shape[1] for part in states], dim=1)
        after = [_project_out(attn, name, part) for name, part in zip(names, parts, strict=True)]
        return after[1], after[0]

    def _norm_rope(
        self, attn: nn.Module, names: list[str], streams: list[Tensor], positions: Any
    ) -> Tensor:
        norms = [getattr(attn, name) for name in names]
        weights = tuple(norm.weight for norm in norms)
        # Code is compiled for training steps alone: previews and evaluations have shapes of their
        # own.
        name = self.kernels if torch.is_grad_enabled() else "fused"
        tables: list[Any] = [None] * len(streams)
        if positions is not None:
            lengths = [stream.shape[1] for stream in streams]
            tables = self.tables.get(self.layout.rotary, positions, lengths, name)
        rounds = self.layout.rounds_to_bf16 and positions is not None
        kernels: Kernels = KERNELS[name]
        joined: Tensor = NormRope.apply(
            kernels, weights, tables, _epsilon(norms[0]), rounds, *streams
        )  # type: ignore[no-untyped-call]
        return joined

    def _dispatch(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        given = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        out: Tensor = dispatch_attention_fn(query, key, value, attn_mask=mask, **given)
        return out


def _joint_mask(image: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """The mask that attention gets, (batch, 1, 1, tokens) if it was given for tokens."""
    mask: Tensor | None = arguments.get("attention_mask")
    prompt = arguments.get("encoder_hidden_states_mask")
    if prompt is not None:
        mask = torch.cat(
            [prompt, torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)], dim=1
        )
    return mask[:, None, None, :] if mask is not None and mask.ndim == 2 else mask


def _project_out(attn: nn.Module, names: Stream, out: Tensor) -> Tensor:
    layers = getattr(attn, names.out, None)
    if layers is None:
        return out
    out = out.contiguous()
    for layer in layers if isinstance(layers, nn.ModuleList) else [layers]:
        out = layer(out)
    return out


def _epsilon(norm: Any) -> float:
    return (
        torch.finfo(torch.float32).eps if norm.eps is None else float(norm.eps)
    )  # as torch's RMSNorm of fp32


@cache
def _processor_class(stock: type) -> type:
    signature = inspect.signature(stock.__call__)

    @wraps(stock.__call__)  # modules look at its parameters to see what it takes
    def call(self: Any, attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, attn, hidden_states, *args, **kwargs).arguments
        if (
            arguments.get("sparse_params") is not None
        ):  # a mask made of rotated queries: the stock way
            return stock.__call__(self, attn, hidden_states, *args, **kwargs)
        return self.attend(attn, hidden_states, arguments)

    return type(f"NormRope{stock.__name__}", (JoinedNormRope, stock), {"__call__": call})


def use_kernels(transformer: nn.Module, layouts: Sequence[AttentionLayout], name: str) -> None:
    """Let every attention module that has one of `layouts` use the kernels of that name, or `stock`
    for diffusers' own.

    May be called again with another name.
    """
    by_class = {layout.processor: layout for layout in layouts}
    tables = RotaryTables()
    for module in transformer.modules():
        processor = getattr(module, "processor", None)
        if isinstance(processor, JoinedNormRope):
            processor.__class__ = type(processor).__mro__[2]
        layout = by_class.get(type(processor).__name__)
        if (
            layout is None
            or name == "stock"
            or getattr(module, layout.image.query_norm, None) is None
        ):
            continue
        changed: Any = processor
        stock: Any = type(processor)
        changed.__class__ = _processor_class(stock)
        changed.layout, changed.kernels, changed.tables = layout, name, tables
