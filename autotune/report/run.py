"""A training run's report as text: promised against measured, and a verdict on the adapter."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from autotune.events import StepFinished
from autotune.plan.candidate import PhasePeak, QuantizationError
from autotune.plan.plan import TrainingPlan
from autotune.plan.run import AdapterVerdict, RunReport, ValidationResult
from autotune.report.text import (
    change_text,
    loss_text,
    memory_text,
    seconds_text,
    titled_command,
    wrapped,
)

PAGE_FILE = "report.html"
"""The page about a run in its output folder."""


def step_text(
    event: StepFinished, smoothed_loss: float | None = None, promised_bytes: int | None = None
) -> str:
    """Epoch, loss, speed and memory of one step.

    Args:
        event: the step.
        smoothed_loss: mean loss of the last steps, shown instead of the step's own.
        promised_bytes: what the plan promised that a run takes at most.
    """
    epoch = "" if event.epoch is None else f"epoch {event.epoch}  "
    loss = event.loss if smoothed_loss is None else smoothed_loss
    held, promise = memory_text(event.memory_bytes), memory_text(promised_bytes)
    unit = promise[-4:] if held[-4:] == promise[-4:] else ""  # 9.10/18.88 GiB
    memory = held if promised_bytes is None else f"{held.removesuffix(unit)}/{promise}"
    busy = "" if event.gpu_utilization is None else f"  GPU {event.gpu_utilization:.0%}"
    odd, skipped = event.gradient_spikes + event.nonfinite_gradients, event.overflowed_gradients
    spikes = f"  {odd} spike{'s' * (odd != 1)}" if odd else ""
    skips = f"  {skipped} skipped" if skipped else ""
    return (
        f"{epoch}loss {loss_text(loss)}  {event.seconds:.3f} s/step  {memory}{busy}{spikes}{skips}"
    )


def validation_text(event: StepFinished) -> str | None:
    """The loss on held-out images after a step, if it was measured."""
    if event.validation_loss is None or event.base_validation_loss is None:
        return None
    losses = _against_base(event.validation_loss, event.base_validation_loss)
    return f"loss on held-out images after step {event.step}: {losses}"


def _against_base(loss: float, base_loss: float) -> str:
    change = f" ({loss / base_loss - 1:+.1%})" if base_loss > 0 else ""
    return f"{base_loss:.4f} without the adapter, {loss:.4f} with it{change}"


def report_lines(report: RunReport) -> list[str]:
    """Promise against reality, memory by phase, the verdict: in a few lines."""
    busy = "" if report.gpu_utilization is None else f", GPU busy {report.gpu_utilization:.0%}"
    change = report.measured_step_seconds / report.expected_step_seconds - 1
    phases, error = phase_bytes(report.phases), report.quantization_error
    expected = phase_bytes(report.expected_phases)
    rows = [
        ("step time", report.expected_step_seconds, report.measured_step_seconds, seconds_text),
        (
            "step memory",
            report.expected_peak_memory_bytes,
            report.measured_peak_memory_bytes,
            memory_text,
        ),
        *((f"  {name}", expected.get(name), size, memory_text) for name, size in phases.items()),
    ]
    table = [f"{name:<14}{text(a):>12}{text(b):>12}" for name, a, b, text in rows]
    table[0] += f"  ({change_text(change)})"
    lines = [
        f"{'':<14}{'planned':>12}{'measured':>12}",
        *table,
        f"{report.num_steps - report.resumed_at} steps in {seconds_text(report.total_seconds)}, "
        f"{report.images_per_second:.2f} images/s{busy}; "
        f"loss {loss_text(report.first_loss)} -> {loss_text(report.final_loss)}",
        *([f"limited by {report.limited_by}"] if report.limited_by else []),
        *(error_lines(error, report.settings.quantization) if error else []),
        *(verdict_lines(report.verdict) if report.verdict else []),
        *(validation_lines(report.validation) if report.validation else []),
        *gradient_lines(report),
        *(f"warning: {warning}" for warning in report.warnings),
    ]
    return [part for line in lines for part in wrapped(line)]


def limit_text(plan: TrainingPlan, step_seconds: float, data_seconds: float) -> str:
    """What most of a step waits for, and how much of the probed rates the run reached.

    Args:
        plan: the run's; without a forecast only waiting for data can be told.
        step_seconds: measured wall time of a step.
        data_seconds: the part of it that was spent waiting for data.
    """
    if plan.frozen.forecast is None:
        return f"unknown; {data_seconds / (step_seconds or 1.0):.0%} of a step waits for data"
    step_time = plan.frozen.forecast.step_time
    share = sum(step_time.waits(data_seconds).values()) / step_seconds
    kind = step_time.limited_by(data_seconds)
    return f"{kind}, {share:.0%} of what this device reached in the probe"


def phase_bytes(phases: Iterable[PhasePeak], process_bytes: int = 0) -> dict[str, int]:
    """Largest memory of each phase: on a GPU with what the process takes besides the allocator's,
    on a CPU that of the process, libraries included."""
    found = {
        p.name: p.host_bytes if p.device_bytes is None else p.device_bytes + process_bytes
        for p in phases
    }
    return {name: size for name, size in found.items() if size is not None}


def after_training_lines(
    report: RunReport, output: Path, report_to: str, *, has_page: bool
) -> list[str]:
    """Where the adapter is, and the commands that come next."""
    folder, adapter = (shlex.quote(str(path)) for path in (output, output / report.adapter))
    converted = f"ComfyUI/models/loras/{shlex.quote(output.name or 'adapter')}.safetensors"
    convert = ["autotune weights convert", adapter, converted, "--format comfyui"]
    if report.adapter.startswith("comfyui"):
        convert = ["cp", adapter, converted]
    return [
        f"{'adapter':<15}{output / report.adapter}",
        *([f"{'report':<15}{output / PAGE_FILE}"] if has_page else ()),
        *titled_command("more pictures", ["autotune sample", folder, "--prompt TEXT"]),
        *titled_command("for ComfyUI", convert),
        *(
            titled_command("curves", ["tensorboard --logdir", folder])
            if report_to == "tensorboard"
            else ()
        ),
    ]


def error_lines(error: QuantizationError, weight_format: str) -> list[str]:
    """The output error that quantizing the real weights caused."""
    worst = f"at most {error.worst:.1%} (block {error.worst_block})"
    return [f"{weight_format}: {error.overall:.1%} off their real outputs, {worst}"]


def verdict_lines(verdict: AdapterVerdict) -> list[str]:
    """The verdict on the adapter."""
    norms = sorted((norm, name) for name, norm in verdict.layer_norms.items() if norm)
    unused = verdict.num_layers - len(norms) - verdict.num_unmoved - verdict.num_not_finite
    norms = norms or [(0.0, "any")]
    (least, low), (most, high) = norms[0], norms[-1]
    moved = "all moved" if not verdict.num_unmoved else f"{verdict.num_unmoved} NEVER MOVED"
    if unused:
        moved += f" but {unused} of the last block, whose output for text the model leaves unused"
    finite = "all finite" if not verdict.num_not_finite else f"{verdict.num_not_finite} NOT FINITE"
    lines = [
        f"adapter: {verdict.num_layers} layers, {moved}, {finite}; norm of update "
        f"{median(n for n, _ in norms):.3g}, "
        f"from {least:.3g} ({low}) to {most:.3g} ({high})"
    ]
    if verdict.base_loss and verdict.adapter_loss is not None:
        lines.append(
            f"loss on fresh noise: {_against_base(verdict.adapter_loss, verdict.base_loss)}"
        )
    return lines


def validation_lines(held_out: ValidationResult) -> list[str]:
    """What the loss on held-out images tells."""
    number = f"{held_out.num_images} held-out image{'s' * (held_out.num_images != 1)}"
    final = held_out.final_loss
    last = (
        "not finite after the last step"
        if final is None
        else _against_base(final, held_out.base_loss)
    )
    lines = [f"loss on {number}: {last}"]
    if final is None or held_out.lowest_loss < final:
        kept = (
            "kept" if held_out.kept_step == held_out.lowest_step else "not kept: --keep-best would"
        )
        lines.append(
            f"  lowest {held_out.lowest_loss:.4f} after step {held_out.lowest_step}, {kept}"
        )
    return lines


def gradient_lines(report: RunReport) -> list[str]:
    """How many gradients stood out, if any did."""
    spikes, nonfinite = report.gradient_spikes, report.nonfinite_gradients
    lines = (
        [f"gradients far above those before (spikes): {spikes} of {report.num_steps}"]
        if spikes
        else []
    )
    lines += [f"gradients that were not finite, taken again: {nonfinite}"] if nonfinite else []
    skipped = f"steps skipped because gradients overflowed fp16: {report.overflowed_gradients}"
    return lines + ([skipped] if report.overflowed_gradients else [])
