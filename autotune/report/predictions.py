"""Text about predictions of at most 80 columns: models, estimates, comparisons of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from autotune.plan.candidate import Candidate
from autotune.plan.prediction import MEMORY_SIGMAS, TIME_EVIDENCE, Estimate
from autotune.plan.words import MAIN, MEMORY, PARTS, PHASES, setting_text, unusual_settings
from autotune.report import plan, text

if TYPE_CHECKING:
    from autotune.search.comparison import Comparison, ModelSummary, NoGpu


def model_lines(
    models: Sequence[ModelSummary], hardware: str | None = None, host_memory: str | None = None
) -> list[str]:
    """List models with their licenses or, for a GPU, what that is predicted to do with them."""
    if hardware is not None:
        return _prediction_lines(models, hardware, host_memory or "64 GiB")
    lines = [f"{'name':<26}{'kind':<6}{'parameters':>11}   license"]
    for model in models:
        size = f"{model.num_parameters / 1e9:.2f}B" if model.num_parameters else "-"
        doubt = " " if model.is_verified else "*"
        license_name = model.license or "unknown"
        lines.append(f"{model.name:<26}{model.kind:<6}{size:>11}{doubt}  {license_name}")
    if not all(model.is_verified for model in models):
        lines.append("* counted in diffusers' classes, not compared with the published files")
    texts = (f"{model.name}: {model.note}" for model in models if model.note)
    return [*lines, *(line for one in texts for line in text.wrapped(one))]


def _prediction_lines(models: Sequence[ModelSummary], hardware: str, host_memory: str) -> list[str]:
    about = f"Predicted for {hardware} with {host_memory} of system RAM (--host-memory)"
    lines = text.wrapped(f"{about}. A run is on 20 images, with each model's usual settings.", 0)
    lines.append(f"{'name':<26}{'kind':<6}{'an image':>17}{'a run':>18}{'VRAM':>12}")
    for model in models:
        found = model.prediction
        if found is None:
            rest = "  not computed ahead: use autotune plan"
        elif found.step_seconds is None or model.run_hours is None:
            rest = f"{'does not fit':>17}"
        else:
            image, run = (
                _range_of(seconds, found.time_uncertainty)
                for seconds in (model.image_seconds, 3600 * model.run_hours)
            )
            rest = f"{image:>17}{run:>18}{text.memory_text(found.run_memory_bytes):>12}"
        lines.append(f"{model.name:<26}{model.kind:<6}{rest}")
        lines += _settings_lines(found.settings) if found and found.settings else []
    if any(model.prediction and model.prediction.step_seconds is None for model in models):
        less = "Perhaps it fits with --quality compact, or a smaller --resolution:"
        lines += text.with_command(less, f"autotune plan --model NAME --hardware {hardware}")
        lines += text.with_command("Other GPUs:", "autotune compare --model NAME")
    return lines


def _settings_lines(candidate: Candidate) -> list[str]:
    size = f"{candidate.micro_batch_size} at a time"
    return text.wrapped(f"    {', '.join((size, *unusual_settings(dict(candidate), MAIN)))}", 0)


def known_text(model: ModelSummary) -> str:
    """Tell what was computed ahead for a model on a GPU; nothing if it was not."""
    known = model.prediction
    if known is None:
        return ""
    if known.step_seconds is None or model.run_hours is None:
        change = "try --quality compact, or a smaller --resolution"
        return f"{model.name} does not fit with its usual settings: {change}"
    image, run = (
        _range_of(seconds, known.time_uncertainty)
        for seconds in (model.image_seconds, 3600 * model.run_hours)
    )
    return (
        f"{model.name} should fit: up to {text.memory_text(known.run_memory_bytes)} of VRAM, "
        f"{image} an image, {run} for a run on 20 images with the model's usual settings"
    )


def estimate_lines(estimate: Estimate) -> list[str]:
    """Answer as a plan does, then tell memory by phase and part, and time by kind of work."""
    prediction, work, job = estimate.prediction, estimate.workload, estimate.job
    candidate, doubt = prediction.candidate, prediction.stated_time_uncertainty
    batch, size = work.effective_batch_size, candidate.micro_batch_size
    name, budget = work.model.name.rpartition("/")[2], text.memory_text(estimate.budget_bytes)
    total = _range_of(job.total_seconds, doubt)
    price, verdict = estimate.price_per_hour, "should fit" if estimate.fits else "does not fit"
    cost = "" if estimate.cost is None else f", {estimate.cost:.2f} for {price:.2f} an hour"
    around = {
        "loading": job.load_seconds,
        "caching": job.cache_seconds,
        "compiling": job.compile_seconds,
        "previews": job.preview_seconds,
        "validation": job.validation_seconds,
        "saving": job.save_seconds,
    }
    besides = [f"{title} {text.rough_seconds(took)}" for title, took in around.items() if took]
    settings = [setting_text("quantization", candidate.quantization)]
    settings += unusual_settings(dict(candidate), MAIN[1:], work.model.num_blocks)
    facts = [
        (verdict, f"{name} on {estimate.hardware}, {plan.size_text(work)}"),
        ("batch size", f"{batch} = {size} at a time x {batch // size} gradient accumulation"),
        ("settings", "; ".join(settings)),
        ("adapter", f"rank {work.rank} on {work.targets}"),
        ("memory", f"up to {text.memory_text(prediction.run_memory_bytes)} of {budget}"),
        (MEMORY["cpu"], f"up to {text.memory_text(prediction.host_memory_bytes)}"),
        ("speed", plan.speed_text(prediction.step_seconds, doubt, work)),
        ("limited by", prediction.step_time.limited_by(0.0)),
        ("the run", f"{estimate.num_steps} steps, {total} in all{cost}"),
        ("in it", ", ".join(besides)),
        ("uncertain", f"{TIME_EVIDENCE}; nothing has run"),
    ]
    if not estimate.fits:
        facts.append(("instead", "`autotune plan` with this model and GPU finds what fits"))
    phases = [(PHASES[phase.name], phase.run_memory_bytes) for phase in prediction.phases]
    size, error = prediction.training.run_memory_bytes, prediction.memory_uncertainty
    training = text.range_text(size, error, text.memory_text, MEMORY_SIGMAS)
    return [
        *text.titled_lines(facts),
        "memory by phase",
        *_bars(phases, text.memory_text),
        f"memory of training, {training}",
        *_bars(prediction.training.breakdown, text.memory_text),
        "time of a step",
        *_bars(prediction.step_time, text.seconds_text),
    ]


def _bars(values: Iterable[tuple[str, float]], form: Callable[[float], str]) -> list[str]:
    shown = {name.removesuffix("_bytes").removesuffix("_seconds"): v for name, v in values if v > 0}
    largest = max(shown.values(), default=0)
    return [
        f"  {PARTS.get(name, name):24}{form(value):>14}  {'#' * round(30 * value / largest)}"
        for name, value in shown.items()
    ]


def _range_of(seconds: float | None, uncertainty: float | None) -> str:
    return "-" if seconds is None else text.range_text(seconds, uncertainty, text.rough_seconds)


def comparison_lines(found: Comparison) -> list[str]:
    """Show speed, memory, hours, cost and settings for each GPU that it fits."""
    fitting = [one for one in found.gpus if one.misfit is None]
    has_prices = any(one.cost is not None for one in fitting)
    cost = f"{f'cost {found.currency}'.rstrip():>10}" if has_prices else ""
    host = f"with {text.memory_text(found.host_memory_bytes)} of system RAM"
    lines = text.wrapped(f"{found.model}: one LoRA, predicted for each GPU {host}", 0)
    lines.append(f"{'GPU':<27}{'an image':>15}{'in all':>16}{'VRAM':>12}{cost}")
    for one in fitting:
        low, high = one.hours_range or (0.0, 0.0)
        speed = _range_of(one.image_seconds, one.time_uncertainty)
        hours = f"{low:.1f} to {high:.1f} h"
        memory = text.memory_text(one.run_memory_bytes)
        price = f"{'-' if one.cost is None else f'{one.cost:.2f}':>10}" if has_prices else ""
        lines.append(f"{one.gpu:<27}{speed:>15}{hours:>16}{memory:>12}{price}")
        lines += _settings_lines(one.settings) if one.settings else []
    if not fitting:
        lines.append("none of these GPUs")
    if found.num_left_out:
        lines.append(f"{found.num_left_out} more would take longer or cost more than asked")
    lines += _misfit_lines([one.gpu for one in found.gpus if one.misfit is not None])
    for first in fitting[:1]:
        besides = {
            "download": first.download_seconds,
            "search": first.search_seconds,
            "loading, caching, previews and checkpoints": first.other_seconds,
        }
        parts = [f"{text.rough_seconds(took)} of {what}" for what, took in besides.items() if took]
        dated = f" Prices are of {found.priced}." if found.priced else ""
        counted = f"{first.num_steps} steps and, on {first.gpu}, {', '.join(parts)}"
        lines += text.wrapped(f"In all: {counted}.{dated}", 0)
    return lines


def _misfit_lines(gpus: list[str]) -> list[str]:
    return text.wrapped(f"does not fit: {', '.join(gpus)}", 14) if gpus else []


def elsewhere_lines(error: NoGpu) -> list[str]:
    """List the fastest GPU of each size that a model fits, then those that it does not fit."""
    from autotune.models.registry import FAMILIES

    defaults = FAMILIES[error.family].defaults
    # The fastest come first.
    fastest = {one.memory_gb: one for one in reversed(error.elsewhere) if one.step_seconds}
    rows = [
        f"{each.gpu:<28}{size:>5g} GB{text.memory_text(each.run_memory_bytes):>12}"
        f"{_range_of(each.image_seconds_with(defaults), each.time_uncertainty):>16}"
        f"{_range_of(3600 * (each.hours_with(defaults) or 0), each.time_uncertainty):>16}"
        for size, each in sorted(fastest.items())
    ]
    return [
        *text.wrapped(f"{error.model} on the fastest GPU of each size, predicted for 20 images", 0),
        f"{'name for --hardware':<28}{'VRAM':>8}{'used':>12}{'an image':>16}{'a run':>16}",
        *rows,
        *_misfit_lines([each.gpu for each in error.elsewhere if each.step_seconds is None]),
    ]
