"""Micro-batch size: images per forward pass. Accumulation fills the user's effective batch, so learning is the same."""

from autotune.knobs.base import Choices, Knob, TuningContext
from autotune.schema import Choice, Workload


class MicroBatchSize(Knob):
    """Every divisor of the effective batch size."""

    name = "micro_batch_size"
    title = "micro-batch"

    def choices(self, context: TuningContext) -> Choices:
        effective = context.workload.effective_batch_size
        return Choices(tuple(size for size in range(1, effective + 1) if effective % size == 0))

    def describe(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} (x {workload.effective_batch_size // int(choice)} accumulated)"
