"""Text about trials and runs: promised against measured, and a verdict on the adapter."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from autotune.events import RecordsMatched, StepFinished
from autotune.plan.candidate import Candidate, PhasePeak, QuantizationError, TrialResult
from autotune.plan.plan import AdapterVerdict, RunReport, TrainingPlan, ValidationResult
from autotune.plan.words import OUTCOMES, UNTOLD
from autotune.report import text

PAGE_FILE = "report.html"
LOG_FILE = "run.log"
TRIAL_HEADER = " # batch  s/step  step mem outcome   settings besides the defaults"
SETTINGS_COLUMN = TRIAL_HEADER.index("settings")
MAX_REASONS = 5


def step_text(
    event: StepFinished, smoothed_loss: float | None = None, promised_bytes: int | None = None
) -> str:
    """Tell epoch, loss, speed and memory of one step; `promised_bytes` is all that a run takes."""
    epoch = "" if event.epoch is None else f"epoch {event.epoch}  "
    loss = event.loss if smoothed_loss is None else smoothed_loss
    held, promise = text.memory_text(event.memory_bytes), text.memory_text(promised_bytes)
    unit = promise[-4:] if held[-4:] == promise[-4:] else ""  # 9.10/18.88 GiB
    memory = held if promised_bytes is None else f"{held.removesuffix(unit)}/{promise}"
    busy = "" if event.gpu_utilization is None else f"  GPU {event.gpu_utilization:.0%}"
    odd, skipped = event.gradient_spikes + event.nonfinite_gradients, event.overflowed_gradients
    spikes = f"  {odd} spike{'s' * (odd != 1)}" if odd else ""
    skips = f"  {skipped} skipped" if skipped else ""
    speed = f"{event.seconds:.3f} s/step"
    return f"{epoch}loss {text.loss_text(loss)}  {speed}  {memory}{busy}{spikes}{skips}"


def validation_text(event: StepFinished) -> str | None:
    """Tell the loss on held-out images after a step, if it was measured."""
    if event.validation_loss is None or event.base_validation_loss is None:
        return None
    losses = _against_base(event.validation_loss, event.base_validation_loss)
    return f"loss on held-out images after step {event.step}: {losses}"


def _against_base(loss: float, base_loss: float) -> str:
    change = f" ({loss / base_loss - 1:+.1%})" if base_loss > 0 else ""
    return f"{base_loss:.4f} without the adapter, {loss:.4f} with it{change}"


def result_lines(report: RunReport) -> list[str]:
    """Tell in a few lines what the run took, what it learned, and what went wrong."""
    taken, verdict = report.num_steps - report.resumed_at, report.verdict
    times = report.measured_step_seconds, report.expected_step_seconds
    sizes = report.run_memory_bytes, report.expected_run_memory_bytes
    step, planned = map(text.seconds_text, times)
    size, promised = map(text.memory_text, sizes)
    image = text.seconds_text(1 / report.images_per_second if report.images_per_second else None)
    loss = f"{text.loss_text(report.first_loss)} -> {text.loss_text(report.final_loss)}"
    facts = [
        ("trained", f"{taken} steps in {text.seconds_text(report.total_seconds)}"),
        ("speed", f"{step} a step (planned {planned}), {image} an image"),
        ("memory", f"{size} at most (planned {promised})"),
        ("loss", f"{loss} while training, smoothed"),
    ]
    if verdict and verdict.base_loss and verdict.adapter_loss is not None:
        facts.append(("on fresh noise", _against_base(verdict.adapter_loss, verdict.base_loss)))
    facts += [("limited by", report.limited_by)] if report.limited_by else []
    if verdict and verdict.num_unmoved + verdict.num_not_finite:
        facts.append(("adapter", _verdict_lines(verdict)[0].removeprefix("adapter: ")))
    warnings = (*report.warnings, *missed_promises(report))
    facts += [("held out", line.strip()) for line in _validation_lines(report.validation)]
    return text.titled_lines([*facts, *(("warning", warning) for warning in warnings)])


def report_lines(report: RunReport) -> list[str]:
    """Compare promise and reality, memory by phase, and give the verdict."""
    busy = "" if report.gpu_utilization is None else f", GPU busy {report.gpu_utilization:.0%}"
    times = report.expected_step_seconds, report.measured_step_seconds
    sizes = report.expected_peak_memory_bytes, report.measured_peak_memory_bytes
    expected, phases = phase_bytes(report.expected_phases), phase_bytes(report.phases)
    needs = report.expected_run_memory_bytes, report.run_memory_bytes
    rows = [
        ("step memory", *map(text.memory_text, sizes)),
        ("run memory", *map(text.memory_text, needs)),
    ]
    for name, size in phases.items():
        rows.append((f"  {name}", text.memory_text(expected.get(name)), text.memory_text(size)))
    planned, measured = map(text.seconds_text, times)
    change = text.change_text(times[1] / times[0] - 1)
    took = text.seconds_text(report.total_seconds)
    first, final = map(text.loss_text, (report.first_loss, report.final_loss))
    lines = [
        f"{'':<14}{'planned':>12}{'measured':>12}",
        f"{'step time':<14}{planned:>12}{measured:>12}  ({change})",
        *(f"{name:<14}{a:>12}{b:>12}" for name, a, b in rows),
        f"{report.num_steps - report.resumed_at} steps in {took}, "
        f"{report.images_per_second:.2f} images/s{busy}; "
        f"loss {first} -> {final}, smoothed",
    ]
    lines += [f"limited by {report.limited_by}"] if report.limited_by else []
    if saved := report.caching_saved_seconds:
        lines.append(f"caching saved {text.seconds_text(saved)} of encoding what is known again")
    if error := report.quantization_error:
        lines.append(error_text(error, report.settings.quantization))
    warnings = (*report.warnings, *missed_promises(report))
    lines += [*adapter_lines(report), *(f"warning: {warning}" for warning in warnings)]
    return [part for line in lines for part in text.wrapped(line)]


def missed_promises(report: RunReport) -> list[str]:
    """Tell how far time and memory were above the plan's promise, if they clearly were."""
    found = []
    for what, promised, measured, bound in (
        ("steps took", report.expected_step_seconds, report.measured_step_seconds, 0.1),
        ("run memory was", report.expected_run_memory_bytes, report.run_memory_bytes, 0.03),
    ):
        if promised and measured and measured > (1 + bound) * promised:
            found.append(f"{what} {measured / promised - 1:.0%} more than the plan promised")
    return found


def limit_text(plan: TrainingPlan, step_seconds: float, data_seconds: float) -> str:
    """Tell what most of a step waits for, and how much of the probed rates the run reached. Of its
    `step_seconds` a step spent `data_seconds` waiting for data, which no forecast knows."""
    if plan.frozen.forecast is None:
        return f"unknown; {data_seconds / (step_seconds or 1.0):.0%} of a step waits for data"
    step_time = plan.frozen.forecast.step_time
    share = sum(step_time.waits(data_seconds).values()) / step_seconds
    kind = step_time.limited_by(data_seconds)
    return f"{kind}, {share:.0%} of what this device reached in the probe"


def phase_bytes(phases: Iterable[PhasePeak], process_bytes: int = 0) -> dict[str, int]:
    """Return the largest memory of each phase, the process's own included."""
    found = {
        p.name: p.host_bytes if p.device_bytes is None else p.device_bytes + process_bytes
        for p in phases
    }
    return {name: size for name, size in found.items() if size is not None}


def after_training_lines(
    report: RunReport, output: Path, plan: TrainingPlan, *, has_page: bool
) -> list[str]:
    """Tell where the adapter is, and the commands that come next."""
    from autotune.models.registry import get_family
    from autotune.weights.names import READ_IN_PART

    work = plan.frozen.workload
    family = get_family(work.model.family).with_expert(plan.job.expert)
    folder, adapter = (shlex.quote(str(path)) for path in (output, output / report.adapter))
    converted = f"ComfyUI/models/loras/{shlex.quote(output.name or 'adapter')}.safetensors"
    convert = ["autotune weights convert", adapter, converted, "--format comfyui"]
    # of these models, ComfyUI reads every format that is written
    if report.adapter.startswith("comfyui") or family.transformer_class in READ_IN_PART["comfyui"]:
        convert = ["cp", adapter, converted]
    lines = [f"{'adapter':<15}{output / report.adapter}"]
    lines += [f"{'report':<15}{output / PAGE_FILE}"] if has_page else []
    sample = ["autotune sample", folder, "--prompt TEXT"]
    sample += ["--control FILE"] if family.min_controls else []
    lines += text.titled_command(f"{'more pictures':<15}", sample)
    lines += text.titled_command(f"{'for ComfyUI':<15}", convert)
    if work.adapter == "lokr":
        from autotune.train.folder import ADAPTER_FILE

        line = family.adapter_code(work.adapter, str(output), ADAPTER_FILE)
        lines += [f"{'in diffusers':<15}{line}"]
    if plan.job.report_to == "tensorboard":
        lines += text.titled_command(f"{'curves':<15}", ["tensorboard --logdir", folder])
    return lines


def error_text(error: QuantizationError, weight_format: str) -> str:
    """Tell the output error that quantizing the real weights caused."""
    worst = f"at most {error.worst:.1%} (block {error.worst_block})"
    return f"{weight_format}: {error.overall:.1%} off their real outputs, {worst}"


def adapter_lines(report: RunReport) -> list[str]:
    """Tell how the adapter's layers moved, its losses, and how many gradients stood out."""
    lines = _verdict_lines(report.verdict) if report.verdict else []
    lines += _validation_lines(report.validation)
    if spikes := report.gradient_spikes:
        lines.append(f"gradients far above those before (spikes): {spikes} of {report.num_steps}")
    if nonfinite := report.nonfinite_gradients:
        lines.append(f"gradients that were not finite, taken again: {nonfinite}")
    if skipped := report.overflowed_gradients:
        lines.append(f"steps skipped because gradients overflowed fp16: {skipped}")
    return lines


def _verdict_lines(verdict: AdapterVerdict) -> list[str]:
    norms = sorted((norm, name) for name, norm in verdict.layer_norms.items() if norm)
    unused = verdict.num_layers - len(norms) - verdict.num_unmoved - verdict.num_not_finite
    norms = norms or [(0.0, "any")]
    (least, low), (most, high) = norms[0], norms[-1]
    moved = "all moved" if not verdict.num_unmoved else f"{verdict.num_unmoved} NEVER MOVED"
    if unused:
        moved += f" but {unused} of the last block, whose output for text the model leaves unused"
    finite = "all finite" if not verdict.num_not_finite else f"{verdict.num_not_finite} NOT FINITE"
    typical = f"{median(norm for norm, _ in norms):.3g}"
    lines = [
        f"adapter: {verdict.num_layers} layers, {moved}, {finite}; norm of update {typical}, "
        f"from {least:.3g} ({low}) to {most:.3g} ({high})"
    ]
    if verdict.base_loss and verdict.adapter_loss is not None:
        losses = _against_base(verdict.adapter_loss, verdict.base_loss)
        lines.append(f"loss on fresh noise: {losses}")
    return lines


def _validation_lines(held_out: ValidationResult | None) -> list[str]:
    if held_out is None:
        return []
    number = f"{held_out.num_images} held-out image{'s' * (held_out.num_images != 1)}"
    final, lowest = held_out.final_loss, held_out.lowest_step
    last = "not finite after the last step"
    if final is not None:
        last = _against_base(final, held_out.base_loss)
    lines = [f"loss on {number}: {last}"]
    if final is None or held_out.lowest_loss < final:
        kept = "kept" if held_out.kept_step == lowest else "not kept: --keep-best would"
        lines.append(f"  lowest {held_out.lowest_loss:.4f} after step {lowest}, {kept}")
    return lines


def trial_text(number: int, max_trials: int, result: TrialResult) -> str:
    """Tell a trial in one line: `trial 3 of 8: 1.70 s a step, 14.20 GiB`."""
    of = f" of {max_trials}" if number <= max_trials else ""
    found = OUTCOMES[result.outcome]
    if result.outcome == "ok":
        step, memory = result.median_step_seconds, text.memory_text(result.peak_memory_bytes)
        again = " (tried for longer)" * result.confirms
        found = f"{text.seconds_text(step)} a step, {memory}{again}"
    return f"trial {number}{of}: {found}"


def trial_lines(number: int, result: TrialResult, first: TrialResult) -> list[str]:
    """Align a trial under TRIAL_HEADER; its settings are those that differ from the first's."""
    verdict: str = result.outcome
    if verdict == "ok" and result.confirms:
        verdict = "confirmed"
    elif verdict == "ok" and result.candidate.compile != "off":
        verdict = "compiled"
    seconds, num_bytes = result.median_step_seconds, result.peak_memory_bytes
    time, memory = "-" if seconds is None else f"{seconds:.3f}", text.memory_text(num_bytes)
    if num_bytes is not None and num_bytes >= 100 * 2**30:  # in at most nine columns
        memory = f"{num_bytes / 2**30:.{1 if num_bytes < 1000 * 2**30 else 0}f} GiB"
    values = dict(result.candidate)
    figures = f"{number:>2} {values['micro_batch_size']:>5} {time:>7} {memory:>9} {verdict:<9}"
    defaults = {name: field.default for name, field in Candidate.model_fields.items()}
    known = defaults if number == 1 else dict(first.candidate)
    untold = ("micro_batch_size", *UNTOLD)
    told = ((name, value) for name, value in values.items() if name not in untold)
    differing = (f"{name}={value}" for name, value in told if value != known[name])
    changed = ", ".join(differing)  # as `--pin` takes them
    settings = changed or "-" if number == 1 else f"as 1 but {changed}" if changed else "as 1"
    return text.wrapped(f"{figures} {settings}", SETTINGS_COLUMN - (number < 10))


def records_lines(event: RecordsMatched) -> list[str]:
    """Tell what earlier measurements contribute."""
    found = {
        "exact": "measured before on such a machine: one trial will verify it",
        "near": f"{event.num_records} of similar machines or work start the search",
    }
    texts = [found[event.kind]] if event.kind in found else []
    texts += text.capped(event.refused, MAX_REASONS, ": `autotune profiles verify`")
    return [note_text(one, "records") for one in texts]


def note_text(note: str, title: str = "note") -> str:
    """Align a remark with the lines before the first trial."""
    return "\n".join(text.titled_lines([(title, note)]))
