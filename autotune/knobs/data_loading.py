"""How batches reach the device: threads that collate them ahead of the step, and the host memory
they wait in.

No search: latents and embeddings are encoded beforehand, so a batch is some megabytes that are
read, stacked and copied while the step before it runs. Every run's report shows how long a step
waits for data.
"""

from autotune.knobs.base import Choices, Knob, TuningContext
from autotune.schema import Choice, HardwareProfile, Workload

OFFERED_WORKERS = (2, 4)
"""Numbers of threads, beyond none and one, that can be asked for."""
AGAINST_NONE = "the host would read and stack the next batch only when the device has done the last"
AGAINST_ONE = (
    "the CPU that trains would read and stack as well: taking turns with a thread cost 3% of a "
    "step; it pays if data "
    "does not fit in memory"
)
AGAINST_MORE = (
    "encoded samples are small: one thread that works a batch ahead left 0.04% of a step waiting; "
    "more would only take "
    "cores from the step. It pays if the cache lies on a slow network disk"
)


class DataWorkers(Knob):
    """One thread beside a GPU, none if the CPU trains; others on request."""

    name = "data_workers"

    def choices(self, context: TuningContext) -> Choices:
        cores = context.hardware.host.logical_cores
        on_cpu = context.hardware.device.kind == "cpu"
        usual, other, against = (0, 1, AGAINST_ONE) if on_cpu else (1, 0, AGAINST_NONE)
        more: dict[Choice, str] = {
            number: AGAINST_MORE for number in OFFERED_WORKERS if number <= cores
        }
        too_many: dict[Choice, str] = {
            n: f"this host has {cores} cores" for n in OFFERED_WORKERS if n > cores
        }
        return Choices((usual,), rejected=too_many, on_request={other: against, **more})

    def describe(self, choice: Choice, workload: Workload) -> str:
        return f"{choice or 'no'} thread{'' if choice == 1 else 's'}"


class BatchMemory(Knob):
    """Page-locked memory if the device reads it over a bus of its own, else ordinary memory."""

    name = "batch_memory"
    names = ("pageable", "pinned")

    def choices(self, context: TuningContext) -> Choices:
        reason = self.unusable_reason("pinned", context.hardware)
        if reason is None and context.hardware.device.memory_kind == "integrated":
            reason = (
                "device and host share one memory: locked pages are lost to both, and the "
                "copy is "
                "no faster"
            )
        if reason is None:
            against = (
                "copies from pageable memory go through a second buffer, and the host waits "
                "for "
                "them"
            )
            return Choices(("pinned",), on_request={"pageable": against})
        return Choices(("pageable",), rejected={"pinned": reason})

    def unusable_reason(self, choice: Choice, hardware: HardwareProfile) -> str | None:
        if choice != "pinned" or hardware.device.kind == "cuda":
            return None
        return f"only CUDA copies from page-locked memory by itself, this is {hardware.device.kind}"
