"""torch.compile of each repeated block: faster steps after a start-up that the job has to pay back."""

import math
from typing import TYPE_CHECKING

from autotune.families import Family
from autotune.knobs.base import Choices, Knob, Parity, TuningContext, unavailable_reason
from autotune.schema import Candidate, Choice, HardwareProfile, Workload

if TYPE_CHECKING:
    from torch import nn

STARTUP_SECONDS = 60.0
"""Seconds to compile one kind of block, forward and backward, for one shape. A round figure, not measured."""
ELEMENTWISE_SHARE = 0.6
"""Share of the time of elementwise kernels that is left once they are fused. Not measured."""
LAUNCH_SHARE = 0.4
"""Share of the launches that is left."""
SAVED_SHARE = 0.1
"""Share of a step that is saved, for the payback alone: published savings of regional compilation range from none to a
quarter."""
REACHED_FLOPS_SHARE = 0.4
"""Share of the dense peak that steps reach."""


class Compile(Knob):
    """`off`, or `block` on request."""

    name = "compile"
    title = "compile"
    names = ("off", "block")

    def unusable_reason(self, choice: Choice, hardware: HardwareProfile) -> str | None:
        return unavailable_reason(hardware, "compile") if choice == "block" else None

    def choices(self, context: TuningContext) -> Choices:
        capability = context.hardware.capability("compile")
        if not capability.available:
            return Choices(("off",), rejected={"block": capability.reason})
        return Choices(("off",), on_request={"block": _payback(context)})

    def conflict(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.compile != "off" and candidate.quantization != "none":
            return "quantized layers run outside compiled code, which leaves nothing to gain"
        return None

    def parity(self, choice: Choice) -> Parity | None:
        reason = "fused kernels keep intermediate results in fp32 where single ones round them"
        return Parity(choice, 0.05, reason) if choice == "block" else None

    def apply(self, transformer: "nn.Module", family: Family, choice: Choice) -> None:
        for block in family.blocks(transformer):
            if choice == "block":
                block.compile()  # the second shape makes it compile for all: captions come in any length
            else:
                block._compiled_call_impl = None


def startup_seconds(family: Family, workload: Workload) -> float:
    """Seconds to compile all blocks, for the first shape and once more for all others; blocks of one kind share it."""
    has_one_shape = len(workload.buckets) == 1 and workload.text_padding == "exact"
    return STARTUP_SECONDS * len(family.block_lists) * (1 if has_one_shape else 2)


def _payback(context: TuningContext) -> str:
    """After how many steps compiling pays, as far as is known."""
    workload = context.workload
    num_steps = context.family.defaults.num_steps(max(1, sum(bucket.num_items for bucket in workload.buckets)))
    startup = startup_seconds(context.family, workload)
    cost = f"compiling takes about {startup:.0f} s here"
    sheet = context.hardware.datasheet
    if sheet is None or sheet.bf16_flops_per_second is None:
        return f"{cost}, and what it saves has to be measured"
    bucket = workload.largest_bucket
    patches = context.family.tokens_per_frame(bucket) * bucket.num_frames
    tokens = workload.effective_batch_size * (patches + workload.max_text_tokens)
    step = 6 * workload.model.num_parameters * tokens / (REACHED_FLOPS_SHARE * sheet.bf16_flops_per_second)
    paid = math.ceil(startup / (SAVED_SHARE * step))
    return f"{cost}, which {paid} steps might pay back at {SAVED_SHARE:.0%} saved; this much data asks for {num_steps}"
