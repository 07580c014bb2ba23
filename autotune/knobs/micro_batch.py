"""Micro-batch size: images per forward pass. Accumulation fills the user's effective batch, so
learning is the same.
"""

from autotune.knobs.base import Choices, Knob, TuningContext
from autotune.schema import Choice, Workload


class MicroBatchSize(Knob):
    """Every divisor of the effective batch size, as far as the family takes several samples at
    once.
    """

    name = "micro_batch_size"
    title = "micro-batch"

    def choices(self, context: TuningContext) -> Choices:
        effective, max_size = (
            context.workload.effective_batch_size,
            context.family.max_micro_batch_size,
        )
        sizes = [size for size in range(1, effective + 1) if effective % size == 0]
        admitted = tuple(size for size in sizes if max_size is None or size <= max_size)
        why = f"{context.family.name} takes {max_size} at once, because captions differ in length"
        return Choices(admitted, dict.fromkeys(sizes[len(admitted) :], why))

    def describe(self, choice: Choice, workload: Workload) -> str:
        return f"{choice} (x {workload.effective_batch_size // int(choice)} accumulated)"
