"""torch.compile of each repeated block: faster steps after a start-up that the job has to pay
back."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autotune.models.family import Family
from autotune.plan.candidate import Choice


def compile_blocks(transformer: nn.Module, family: Family, choice: Choice) -> None:
    """Compile each block for `block`; leave all as they are for `off`."""
    if choice == "block":
        # Sizes that are equal at the second shape would have to be so at all others.
        torch.fx.experimental._config.use_duck_shape = False
        # What both passes compute alike would be computed once and kept: weights of 8 bits that
        # are cast.
        torch._functorch.config.cse = all(
            weight.element_size() > 1 for weight in transformer.parameters()
        )
    for block in family.blocks(transformer):
        is_adapted = any(parameter.requires_grad for parameter in block.parameters())
        block._compiled_call_impl = (
            CompiledBlock(block._call_impl, is_adapted) if choice == "block" else None
        )


class CompiledBlock:
    """What a block is called by once it is compiled: its code for the first shapes, or that for all
    others.

    Left to itself torch compiles once more when another input's size is first seen to change, and
    all of it twice: what enters the first block needs no gradient. That made six graphs of three
    buckets and three lengths of captions, of which two are left if that block runs uncompiled and
    the second shape stands for all others. A block is the first of its kind if its first input, the
    stream that it adds to, needs no gradient: Kandinsky 5's first visual block gets text that does.
    FLUX.1 made four more, for streams that are parts of another, with that one's strides; Kandinsky
    5 and Wan one or two, for tables of positions whose sizes had happened to be equal.
    """

    backend: str | Callable[..., Any] = "inductor"
    """torch.compile's."""

    def __init__(self, plain: Callable[..., Any], is_adapted: bool) -> None:
        self._plain, self._is_adapted = plain, is_adapted
        self._for_first = torch.compile(plain, backend=self.backend)
        self._for_others = torch.compile(plain, backend=self.backend, dynamic=True)
        self._first: tuple[object, ...] | None = None

    @cached_property
    def recomputing(self) -> "CompiledBlock":
        """The same under gradient checkpointing, which is compiled, too: the backward pass
        computes again no more than it needs. Around compiled code all of it runs twice, e.g. a
        block's last product."""
        plain, checkpoint = self._plain, torch.utils.checkpoint.checkpoint

        def run(*inputs: Any) -> Any:
            return checkpoint(plain, *inputs, use_reentrant=False)

        return CompiledBlock(run, self._is_adapted)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((inputs, named))
        stream = next(
            leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )
        if self._is_adapted and not stream.requires_grad:
            return self._plain(*inputs, **named)
        shapes = tuple(getattr(leaf, "shape", leaf) for leaf in leaves)
        if self._first is None:
            self._first = shapes
        inputs, named = torch.utils._pytree.tree_map_only(torch.Tensor, _in_order, (inputs, named))
        return (self._for_first if shapes == self._first else self._for_others)(*inputs, **named)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of one that is no part of another: torch compiles anew for
    others, even those of dimensions of one."""
    is_in_order = tensor.is_contiguous() and 1 not in tensor.shape
    return tensor if is_in_order else tensor.flatten().view(tensor.shape)
