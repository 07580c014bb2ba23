"""From a winner and its evidence to the frozen part of a plan."""

import math
from collections.abc import Sequence

from autotune.cost.job_estimate import job_time
from autotune.cost.memory import Parallel
from autotune.cost.predict import CostModel
from autotune.knobs.settings import encoder_element_bytes
from autotune.plan.hardware import MemoryBudget, shares_host_memory
from autotune.plan.job import Job
from autotune.plan.plan import Expected, PlannedHardware
from autotune.plan.trial import TrialResult
from autotune.plan.typical import mean_text_tokens
from autotune.plan.workload import Workload
from autotune.search.winner import Score


def planned_hardware(cost: CostModel, budget: MemoryBudget, parallel: Parallel) -> PlannedHardware:
    """The machine, as far as a plan depends on it, and how its processes share the work."""
    hardware = cost.hardware
    return PlannedHardware(
        device_name=hardware.device.name,
        device_kind=hardware.device.kind,
        fingerprint=hardware.fingerprint,
        match_keys=hardware.match_keys,
        total_memory_bytes=hardware.device.total_memory_bytes,
        budget_bytes=budget.num_bytes,
        versions=hardware.versions,
        num_processes=parallel.num_processes,
        strategy=parallel.strategy,
        assumed=hardware.assumed,
        encoder_gpu=cost.encoder_gpu,
    )


def build_expectation(
    best: Score,
    trials: Sequence[TrialResult],
    cost: CostModel,
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
        price_per_hour: of one device.
    """
    cost = cost.with_calibration(trials)
    own = [trial for trial in trials if trial.candidate == best.candidate]
    rehearsals = [trial for trial in own if trial.confirms]
    phases = rehearsals[-1].phases if rehearsals else ()
    prediction = cost.predict(best.candidate)
    peak = best.peak_memory_bytes if trials else prediction.allocated_memory_bytes
    largest = max([peak, *(phase.device_bytes or 0 for phase in phases)])
    overhead = (
        prediction.training.run_memory_bytes - prediction.allocated_memory_bytes
    )  # outside the allocator
    room = cost.training_budget.num_bytes - largest
    if trials and room > 0:  # they ran within the budget, so that they need no more than it
        overhead = min(overhead, room)
    host, kept = (
        max([t.host_memory_bytes or 0 for t in own], default=0),
        cost.resident_encoder_bytes,
    )
    on_cpu, is_complete = (
        cost.hardware.device.kind == "cpu",
        any(phase.name == "caching" for phase in phases),
    )
    if on_cpu and own:  # where the process as a whole was measured
        overhead = (
            max([phase.host_bytes or 0 for phase in phases] or [own[-1].host_memory_bytes or 0])
            - peak
        )
        kept = 0 if phases else kept  # they were there
    if not is_complete:  # the others are only predicted
        others = [phase.run_memory_bytes for phase in prediction.phases if phase.name != "train"]
        overhead = max([overhead, *(needed - largest for needed in others)])
    if trials:  # which ran in one process of autotune's executor
        alone = cost.as_trials_run().predict(best.candidate)
        overhead += prediction.allocated_memory_bytes - alone.allocated_memory_bytes
    data_bytes = held_data_bytes(cost, workload, job, best.candidate.precision)
    on_host = shares_host_memory(cost.hardware.device.memory_kind)
    num_images = sum(bucket.num_items for bucket in workload.buckets)
    shown = {"num_previews": job.num_previews, "num_validations": job.num_validations}
    around = job_time(cost, prediction, num_steps=0, num_images=num_images, **shown)
    return Expected(
        evidence="measured" if trials else "predicted",
        step_seconds=best.step_seconds,
        images_per_second=workload.effective_batch_size / best.step_seconds,
        joules_per_image=best.joules_per_image,
        peak_memory_bytes=peak,
        process_memory_bytes=max(0, overhead) + kept + (data_bytes if on_host else 0),
        phases=phases,
        host_memory_bytes=None if on_host else max(host, prediction.host_memory_bytes) + data_bytes,
        time_uncertainty=None if trials else prediction.time_uncertainty,
        memory_uncertainty=None if trials else prediction.memory_uncertainty,
        other_seconds=round(around.total_seconds, 3),
        price_per_hour=price_per_hour,
    )


def held_data_bytes(cost: CostModel, workload: Workload, job: Job, precision: str) -> int:
    """What a run holds of its data in the host's memory: loss masks, and with `cache: memory` all
    that is encoded.

    Captions count at their mean length, and one for each image; `shuffle_tags` and `flip` multiply
    what is encoded.
    """
    images = captions = masks = 0
    for bucket in workload.buckets:
        shapes = cost.family.sample_shapes(
            cost.model.config, bucket, mean_text_tokens(workload), workload.num_control_images
        )
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        texts = sum(size for name, size in sizes.items() if "prompt" in name)
        images += bucket.num_items * (sum(sizes.values()) - texts)
        captions += bucket.num_items * texts
        masks += bucket.num_items * math.prod(shapes["latents"][-2:])
    held = masks if job.loss_mask != "none" else 0
    if job.cache == "memory":
        element = encoder_element_bytes(precision)
        held += element * (images * (1 + job.flip) + captions * max(1, job.shuffle_tags))
    return held
