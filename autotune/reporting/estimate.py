"""An estimate as text of at most 80 columns. Pure."""

from collections.abc import Callable

from autotune.reporting.text import WIDTH, memory_text, seconds_text, uncertainty_text, wrapped
from autotune.schema import Estimate

PARTS = {
    "weight_bytes": "weights",
    "adapter_bytes": "adapter",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "saved_activation_bytes": "saved activations",
    "transient_bytes": "transient",
    "attention_workspace_bytes": "attention workspace",
    "process_overhead_bytes": "process overhead",
    "allocator_rounding_bytes": "allocator rounding",
}
KINDS = {
    "matmul_seconds": "frozen layers",
    "adapter_seconds": "adapter",
    "attention_seconds": "attention",
    "elementwise_seconds": "norms and elementwise",
    "dequantization_seconds": "dequantization",
    "convolution_seconds": "convolutions",
    "optimizer_seconds": "optimizer",
    "overhead_seconds": "launch overhead",
    "transfer_seconds": "transfers",
}


def estimate_text(estimate: Estimate) -> str:
    """The whole answer: verdict, settings, memory by part and by phase, time by kind of work,
    the job.
    """
    prediction, workload = estimate.prediction, estimate.workload
    bucket = workload.largest_bucket
    frames = f" x {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
    recompute = prediction.step_time.recompute_seconds
    needed = memory_text(prediction.run_memory_bytes)
    verdict = "fits" if estimate.fits else "does not fit"
    way_out = (
        []
        if estimate.fits
        else ["  `autotune plan` with the same model and hardware finds what fits"]
    )
    lines = [
        *wrapped(f"{workload.model.name} on {estimate.hardware}: {verdict}"),
        f"  predicted, nothing has run; run memory {needed} of "
        f"{memory_text(estimate.budget_bytes)}",
        *way_out,
        "",
        f"  shape       {bucket.width_px} x {bucket.height_px} px{frames}, "
        f"{workload.max_text_tokens} text tokens",
        f"  adapter     rank {workload.rank} on {workload.targets}, effective batch "
        f"{workload.effective_batch_size}",
        *_settings(estimate),
        "",
        "Training: "
        f"{memory_text(prediction.training.run_memory_bytes)}{uncertainty_text(prediction.memory_band)},"
        f" of which {memory_text(prediction.allocated_memory_bytes)} step memory",
        *_table({PARTS[k]: v for k, v in prediction.training.breakdown if v}, memory_text),
        "",
        "Phases",
        *_table({phase.name: phase.run_memory_bytes for phase in prediction.phases}, memory_text),
        f"  {'host memory':24}{memory_text(prediction.host_memory_bytes):>14}",
        "",
        f"Step time: {prediction.step_seconds:.3g} "
        f"s{uncertainty_text(prediction.time_uncertainty)},"
        f" {prediction.images_per_second:.3g} images/s",
        *_table(
            {KINDS[k]: v for k, v in prediction.step_time if k in KINDS and v > 0}, seconds_text
        ),
        *([f"  of which recomputing    {seconds_text(recompute):>14}"] if recompute else []),
        "",
        *_job(estimate),
    ]
    return "\n".join(line[:WIDTH].rstrip() for line in lines)


def _settings(estimate: Estimate) -> list[str]:
    candidate = estimate.prediction.candidate
    weights = (
        "no quantization"
        if candidate.quantization == "none"
        else f"quantization {candidate.quantization}"
    )
    blocks = estimate.workload.model.num_blocks
    return [
        f"  settings    micro-batch {candidate.micro_batch_size}, {candidate.precision}, "
        f"{weights},",
        f"              checkpointing {candidate.checkpointed_blocks} of {blocks} blocks,"
        f" attention {candidate.attention}",
    ]


def _table(values: dict[str, float], form: Callable[[float], str]) -> list[str]:
    largest = max(values.values(), default=0)
    rows = []
    for name, value in values.items():
        bar = "#" * round(30 * value / largest) if largest else ""
        rows.append(f"  {name:24}{form(value):>14}  {bar}")
    return rows


def _job(estimate: Estimate) -> list[str]:
    job = estimate.job
    lines = [
        f"Job of {estimate.num_steps} steps: {seconds_text(job.total_seconds)}"
        f"{uncertainty_text(estimate.prediction.time_uncertainty)}",
        *(
            [f"  compile, and plan attention, {seconds_text(job.compile_seconds)}"]
            if job.compile_seconds
            else []
        ),
        f"  load {seconds_text(job.load_seconds)}, caches {seconds_text(job.cache_seconds)},"
        f" previews {seconds_text(job.preview_seconds)}, saves {seconds_text(job.save_seconds)}",
    ]
    if estimate.cost is not None:
        lines.append(f"  {estimate.cost:.2f} at {estimate.price_per_hour:.2f} per hour")
    return lines
