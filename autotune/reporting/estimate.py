"""An estimate as text of at most 80 columns. Pure."""

from collections.abc import Callable

from autotune.prediction import Estimate, PhaseMemory

WIDTH = 80
GIB = 2**30
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
    "dequantization_seconds": "dequantisation",
    "convolution_seconds": "convolutions",
    "optimizer_seconds": "optimizer",
    "overhead_seconds": "launch overhead",
}


def gib(size: float) -> str:
    """`12.34 GiB`."""
    return f"{size / GIB:.2f} GiB"


def duration(seconds: float) -> str:
    """`3 h 05 min`, `4 min 10 s` or `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def render(estimate: Estimate) -> str:
    """The whole answer: verdict, settings, memory by part and by phase, time by kind of work, the job."""
    prediction, workload = estimate.prediction, estimate.workload
    bucket = workload.largest_bucket
    frames = f" x {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
    verdict = "fits" if estimate.fits else "does not fit"
    lines = [
        f"{workload.model.name} on {estimate.hardware}: {verdict}",
        f"  predicted, nothing has run; {gib(prediction.required_memory_bytes)} of {gib(estimate.budget_bytes)} needed",
        "",
        f"  shape       {bucket.width_px} x {bucket.height_px} px{frames}, {workload.max_text_tokens} text tokens",
        f"  adapter     rank {workload.rank} on {workload.targets}, effective batch {workload.effective_batch_size}",
        *_settings(estimate),
        "",
        f"Training step: {gib(prediction.peak_memory_bytes)} (+-{_percent(prediction.memory_uncertainty)})",
        *_table({PARTS[k]: v for k, v in _train(estimate).breakdown if v}, gib),
        "",
        "Phases",
        *_table({phase.name: phase.peak_memory_bytes for phase in prediction.phases}, gib),
        f"  {'host memory':24}{gib(prediction.host_memory_bytes):>14}",
        "",
        f"Step time: {duration(prediction.step_seconds)} (+-{_percent(prediction.time_uncertainty)}),"
        f" {prediction.images_per_second:.3g} images/s",
        *_table({KINDS[k]: v for k, v in prediction.step_time if k in KINDS and v > 0}, duration),
        *_recompute(prediction.step_time.recompute_seconds),
        "",
        *_job(estimate),
    ]
    return "\n".join(line[:WIDTH].rstrip() for line in lines) + "\n"


def _settings(estimate: Estimate) -> list[str]:
    candidate = estimate.prediction.candidate
    blocks = estimate.workload.model.num_blocks
    return [
        f"  settings    micro-batch {candidate.micro_batch_size}, {candidate.precision},"
        f" quantization {candidate.quantization},",
        f"              checkpointing {candidate.checkpointed_blocks} of {blocks} blocks,"
        f" attention {candidate.attention}",
    ]


def _train(estimate: Estimate) -> PhaseMemory:
    return next(phase for phase in estimate.prediction.phases if phase.name == "train")


def _table(values: dict[str, float], form: Callable[[float], str]) -> list[str]:
    largest = max(values.values(), default=0)
    rows = []
    for name, value in values.items():
        bar = "#" * round(30 * value / largest) if largest else ""
        rows.append(f"  {name:24}{form(value):>14}  {bar}")
    return rows


def _recompute(seconds: float) -> list[str]:
    return [f"  of which recomputing    {duration(seconds):>14}"] if seconds > 0 else []


def _job(estimate: Estimate) -> list[str]:
    job = estimate.job
    lines = [
        f"Job of {estimate.num_steps} steps: {duration(job.total_seconds)}",
        *([f"  compile {duration(job.compile_seconds)}"] if job.compile_seconds else []),
        f"  load {duration(job.load_seconds)}, caches {duration(job.cache_seconds)},"
        f" previews {duration(job.preview_seconds)}, saves {duration(job.save_seconds)}",
    ]
    if estimate.cost is not None:
        lines.append(f"  {estimate.cost:.2f} at {estimate.price_per_hour:.2f} per hour")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
