"""torch.compile of each repeated block: faster steps after a start-up that the job has to pay
back."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autotune.knobs import norm_rope
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import Choices, Knob, Parity, TuningContext, unavailable_reason
from autotune.models.family import Family
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import HardwareProfile
from autotune.plan.workload import Workload
from autotune.system.lazy import lazy_module

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = lazy_module("torch")

STARTUP_SECONDS = 60.0
"""Seconds to compile one kind of block, forward and backward, for one shape, until a trial has
measured them: they decide whether one is made, and no more. A round figure; Qwen-Image's with
8-bit products took 34 s of a CPU's time beside the C++ compiler's, 43 more at the second shape,
and 13 and 19 where an earlier process had left its code."""
ELEMENTWISE_SHARE = 0.6
"""Share of the time of elementwise kernels that is left once they are fused. Not measured: it
decides what is tried."""
LAUNCH_SHARE = 0.4
"""Share of the launches that is left."""


class Compile(Knob):
    """`off`; `block` for the winner of a search if a trial shows that it pays, or on request."""

    name = "compile"
    names = ("off", "block")

    def unusable_reason(self, choice: Choice, hardware: HardwareProfile) -> str | None:
        return unavailable_reason(hardware, "compile") if choice == "block" else None

    def choices(self, context: TuningContext) -> Choices:
        capability = context.hardware.capability("compile")
        if not capability.available:
            return Choices(("off",), rejected={"block": capability.reason})
        startup = _seconds_of_blocks(len(context.family.block_lists), context.workload)
        why = (
            "the winner is tried compiled if the steps may pay back a start-up of some "
            f"{startup:.0f} s"
        )
        return Choices(("off",), on_request={"block": why})

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        weight_format = WEIGHT_FORMATS.get(candidate.quantization)
        if candidate.compile != "off" and weight_format and weight_format.stand_in:
            return "this weight format has kernels of its own, which torch.compile cannot trace"
        return None

    def parity(self, choice: Choice) -> Parity | None:
        reason = "fused kernels keep intermediate results in fp32 where single ones round them"
        # Two blocks that recompute, of which the second is compiled: its code has all that others'
        # has, and more.
        return (
            Parity(choice, 0.05, reason, other_choices={"checkpointed_blocks": 2})
            if choice == "block"
            else None
        )

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
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


def _in_order(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor with the strides of one that is no part of another: torch compiles anew for
    others, even those of dimensions of one."""
    is_in_order = tensor.is_contiguous() and 1 not in tensor.shape
    return tensor if is_in_order else tensor.flatten().view(tensor.shape)


def startup_seconds(candidate: Candidate, family: Family, workload: Workload) -> float:
    """Seconds to compile what a candidate compiles."""
    if candidate.compile == "block":
        # One list of blocks has some that recompute and some that do not.
        is_mixed = 0 < candidate.checkpointed_blocks < workload.model.num_blocks
        return _seconds_of_blocks(len(family.block_lists) + is_mixed, workload)
    return norm_rope.STARTUP_SECONDS if candidate.norm_rope == "compiled" else 0.0


def _seconds_of_blocks(num_kinds: int, workload: Workload) -> float:
    """Of blocks of so many kinds, for the first shape and once more for all others; blocks of
    one kind share it."""
    has_one_shape = len(workload.buckets) == 1 and workload.text_padding == "exact"
    return STARTUP_SECONDS * num_kinds * (1 if has_one_shape else 2)
