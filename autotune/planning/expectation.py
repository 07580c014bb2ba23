"""From a winner and its evidence to the frozen part of a plan."""

from collections.abc import Sequence

from autotune.cost import Parallel, Predictor, job_time
from autotune.schema import Expected, HardwareProfile, Job, PlannedHardware, TrialResult, Workload
from autotune.search import Score


def planned_hardware(hardware: HardwareProfile, parallel: Parallel) -> PlannedHardware:
    """The machine, as far as a plan depends on it, and how its processes share the work."""
    return PlannedHardware(
        device_name=hardware.device.name,
        device_kind=hardware.device.kind,
        fingerprint=hardware.fingerprint,
        match_keys=hardware.match_keys,
        total_memory_bytes=hardware.device.total_memory_bytes,
        budget_bytes=hardware.device.budget_bytes,
        versions=hardware.versions,
        num_processes=parallel.num_processes,
        strategy=parallel.strategy,
    )


def build_expectation(
    best: Score,
    trials: Sequence[TrialResult],
    cost: Predictor,
    workload: Workload,
    job: Job,
    price_per_hour: float | None = None,
) -> Expected:
    """What the plan promises: measured by `trials`, or predicted where there are none.

    Args:
        best: the settings.
        trials: all of them.
        cost: of the work of one process.
        workload: of all processes.
        job: what the settings are for.
        price_per_hour: of the machine.
    """
    cost.calibrate(trials)
    rehearsals = [trial for trial in trials if trial.confirms and trial.candidate == best.candidate]
    phases = rehearsals[-1].phases if rehearsals else ()
    prediction = cost.predict(best.candidate)
    peak = best.peak_memory_bytes if trials else prediction.allocated_memory_bytes
    largest = max([peak, *(phase.device_bytes or 0 for phase in phases)])
    overhead = prediction.peak_memory_bytes - prediction.allocated_memory_bytes  # what the allocator does not count
    room = cost.hardware.device.budget_bytes - largest
    if trials and room > 0:  # they ran within the budget, so that they need no more than it
        overhead = min(overhead, room)
    if not any(phase.name == "caching" for phase in phases):  # the others are only predicted
        others = [phase.peak_memory_bytes for phase in prediction.phases if phase.name != "train"]
        overhead = max([overhead, *(needed - largest for needed in others)])
    if cost.hardware.device.kind == "cpu":
        host = max((t.host_memory_bytes or 0 for t in trials if t.candidate == best.candidate), default=0)
        overhead = host - best.peak_memory_bytes
    if trials:  # which ran in one process
        overhead += (
            prediction.allocated_memory_bytes - cost.single_process.predict(best.candidate).allocated_memory_bytes
        )
    return Expected(
        evidence="measured" if trials else "predicted",
        step_seconds=best.step_seconds,
        images_per_second=workload.effective_batch_size / best.step_seconds,
        peak_memory_bytes=peak,
        process_memory_bytes=max(0, overhead) + cost.resident_encoder_bytes,
        phases=phases,
        other_seconds=job_time(
            cost,
            prediction,
            num_steps=0,
            num_images=sum(bucket.num_items for bucket in workload.buckets),
            num_previews=job.num_previews,
        ).total_seconds,
        price_per_hour=price_per_hour,
    )
