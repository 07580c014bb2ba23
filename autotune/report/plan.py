"""Text about plans and trials for a terminal of 80 columns; two plans side by side."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.plan import prediction, words, workload
from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate, Choice
from autotune.plan.plan import CheckResult, Expected, TrainingPlan
from autotune.report import points, run, text

if TYPE_CHECKING:
    from autotune.search.space import SearchSpace

WORTH_TELLING = 1.05  # gain from more memory that is named
WITHIN_REACH = 2  # times the memory that a run may take: few could get a card with more
SAVES_NOTHING: dict[str, Choice] = {**dict.fromkeys(BLOCK_COUNTS, 0), "quantization": "none"}
DENSITIES = {
    "logit_normal": "Stable Diffusion 3's density",
    "uniform": "the model's own noise schedule",
}
# So end the names of what is measured, not chosen, and compared by its ratio.
QUANTITIES = ("_bytes", "_seconds", "num_steps", "cost")
DIFFERING = {  # titles of differences that are not their names
    "device": "GPU",
    "workload.effective_batch_size": "effective batch size",
    "run_memory_bytes": "memory of the run",
    "step_memory_bytes": "memory of a step",
    "step_seconds": "a step",
    "image_seconds": "an image",
    "run_seconds": "the run",
    "search_seconds": "the search",
    "num_steps": "steps",
}


def settings_items(plan: TrainingPlan) -> list[tuple[str, str]]:
    """Return every knob's title and its value in words."""
    number = plan.frozen.workload.model.num_blocks
    items = [
        (words.TITLES[name], words.value_text(name, value, number))
        for name, value in plan.frozen.settings
    ]
    return [*items, (words.TITLES["caching"], words.caching_text(plan.frozen.caching))]


def plan_lines(plan: TrainingPlan) -> list[str]:
    """Answer in some ten lines: does it fit, with which settings, how long, and what is faster."""
    frozen, expected, hardware = plan.frozen, plan.frozen.expected, plan.frozen.hardware
    number, size = hardware.num_processes, frozen.settings.micro_batch_size
    work, batch = frozen.workload, frozen.workload.effective_batch_size
    gpus = f"{number} x " if number > 1 else ""
    is_measured, name = expected.evidence == "measured", work.model.name.rpartition("/")[2]
    subject, passes = f"{name} on {gpus}{hardware.device_name}", batch // number // size
    shared = f" x {number} GPUs ({hardware.strategy})" if number > 1 else ""
    left = hardware.budget_bytes - expected.run_memory_bytes
    sizes = (expected.run_memory_bytes, hardware.budget_bytes)
    needed, budget = map(text.memory_text, sizes)
    settings = [words.setting_text("quantization", frozen.settings.quantization)]
    settings += words.unusual_settings(dict(frozen.settings), words.MAIN[1:], work.model.num_blocks)
    if frozen.caching != CachingSettings():
        settings.append(words.setting_text("caching", words.caching_text(frozen.caching)))
    facts = [
        ("fits" if is_measured else "should fit", f"{subject}, {size_text(work)}"),
        ("batch size", f"{batch} = {size} at a time x {passes} gradient accumulation{shared}"),
        ("settings", "; ".join(settings)),
        (
            words.MEMORY[hardware.device_kind],
            f"up to {needed} of {budget}, {text.memory_text(left)} stay free",
        ),
    ]
    if expected.host_memory_bytes is not None:
        less = "" if is_measured else "; if you have less: --host-memory SIZE"
        own = text.memory_text(number * expected.host_memory_bytes)
        facts.append((words.MEMORY["cpu"], f"up to {own}{less}"))
    facts += [
        ("speed", speed_text(expected.step_seconds, expected.time_uncertainty, work)),
        ("the run", job_text(plan)),
    ]
    if expected.time_uncertainty is not None:
        measures = "" if frozen.overheads else "; `train` measures it"
        facts.append(("uncertain", f"{prediction.TIME_EVIDENCE}{measures}"))
    if is_measured:
        counts = Counter("rehearsal" if t.confirms else "trial" for t in frozen.trials)
        runs = [f"{number} {kind}{'s' * (number > 1)}" for kind, number in counts.items()]
        took = text.seconds_text(frozen.search_seconds)
        facts.append(("measured", f"in {' and '.join(runs)}, {took}"))
    facts += [("assumed", line.removeprefix("assumed: ")) for line in assumption_text(plan)]
    faster = [*_gains_of_memory(plan), *frozen.advice]
    facts += zip(("likely faster", *[""] * len(faster)), faster, strict=False)
    notes = []
    if theirs := frozen.overheads:
        notes.append(f"memory and time as {theirs.program} takes them, by its source")
    confirmed = [trial for trial in frozen.trials if trial.confirms and trial.outcome == "ok"]
    if confirmed and confirmed[-1].message:
        notes.append(f"not all of a run could be rehearsed: {confirmed[-1].message}")
    if caps := [t.memory_cap_bytes for t in frozen.trials if t.memory_cap_bytes is not None]:
        notes.append(f"tried within {text.memory_text(max(caps))}, as you asked: never shared")
    return text.titled_lines([*facts, *(("note", note) for note in notes)])


def size_text(work: workload.Workload) -> str:
    """Tell the number and size of what is trained on."""
    count, largest = sum(bucket.num_items for bucket in work.buckets), work.largest_bucket
    kind = "clip" if work.has_clips else "image"
    size = f"{'up to ' * (len(work.buckets) > 1)}{largest.width_px}x{largest.height_px}"
    frames = f", {largest.num_frames} frames" if largest.num_frames > 1 else ""
    return f"{count} {kind}{'s' * (count > 1)} of {size}{frames}"


def speed_text(step_seconds: float, doubt: float | None, work: workload.Workload) -> str:
    """Tell the time of a step and of an image, as a range if it is predicted."""
    form = text.seconds_text if doubt is None else text.rough_seconds
    each = (step_seconds, step_seconds / work.effective_batch_size)
    step, item = (text.range_text(seconds, doubt, form) for seconds in each)
    return f"{step} a step, {item} {'a clip' if work.has_clips else 'an image'}"


def _gains_of_memory(plan: TrainingPlan) -> list[str]:
    forecast, seconds = plan.frozen.forecast, plan.frozen.expected.step_seconds
    budget = plan.frozen.hardware.budget_bytes
    beyond = [
        each
        for each in (forecast.alternatives if forecast else ())
        if budget < each.run_memory_bytes < WITHIN_REACH * budget
        and each.step_seconds < seconds / WORTH_TELLING
    ]
    if not beyond or plan.frozen.workload.objective == "memory":
        return []
    ends = (min(beyond, key=attrgetter(key)) for key in ("run_memory_bytes", "step_seconds"))
    gains = dict.fromkeys(
        f"{seconds / each.step_seconds:.2f}x with {text.memory_text(each.run_memory_bytes)}"
        for each in ends
    )
    return [f"{', '.join(gains)} of {words.MEMORY[plan.frozen.hardware.device_kind]}"]


def train_hint(plan: TrainingPlan, file: Path) -> str:
    """Tell where the plan was written, and the command that goes on from it."""
    name = f"./{file}" if str(file).startswith("-") else str(file)  # no option
    frozen, command = plan.frozen, ["autotune", "train", name]
    command += ["--data", "FOLDER"] if plan.job.data is None and not plan.job.slider else []
    if frozen.workload.num_control_images and plan.job.control is None:
        command += ["--control", "FOLDER"]
    if ":" in frozen.workload.optimizer.name:  # code of others is loaded only if named
        command += ["--optimizer", frozen.workload.optimizer.name]
    is_here = frozen.expected.evidence != "predicted"
    hint = "train it with:" if is_here else f"on {frozen.hardware.device_name} train it with:"
    if frozen.overheads:
        trainer = frozen.overheads.program
        hint = f"write it for {trainer} with:"
        command = ["autotune", "export-config", name, "--to", trainer, "-o", "FOLDER"]
    lines = text.with_command(f"written to {file}; {hint}", shlex.join(command))
    if len(lines) > 1:  # file and command stay whole, each on its own line
        where = f"written to {text.printable(str(file))}"
        lines = [where, *text.with_command(hint, shlex.join(command))]
    return "\n".join(lines)


def job_text(plan: TrainingPlan) -> str:
    """Tell the job's time from loading to the last checkpoint, and its cost if that is known."""
    expected, number = plan.frozen.expected, plan.frozen.hardware.num_processes
    epochs = "" if plan.job.num_train_epochs is None else f"{plan.job.num_train_epochs} epochs, "
    price = ""
    if (cost := plan.job_cost) is not None:
        gpus = f"{number} GPUs, each " if number > 1 else ""
        price = f", {cost:.2f} for {gpus}{expected.price_per_hour:.2f} an hour"
    form = text.seconds_text if expected.time_uncertainty is None else text.rough_seconds
    total = text.range_text(plan.job_seconds, expected.time_uncertainty, form)
    return f"{epochs}{plan.job.num_steps} steps, {total} in all{price}"


def assumption_text(plan: TrainingPlan) -> list[str]:
    """Tell what the plan takes for granted of a machine that it was not made on."""
    if not (packages := ", ".join(plan.frozen.hardware.assumed)):
        return []
    return [f"assumed: {packages} installed, and as fast as published"]


def check_lines(result: CheckResult, plan_file: str, machine: str = "this machine") -> list[str]:
    """Tell that the plan of this file fits the machine, or each reason why it does not."""
    if result.fits:
        return [f"{plan_file} is valid and fits {machine}"]
    texts = [f"does not fit {machine}: {misfit}" for misfit in result.misfits]
    return [line for one in texts for line in text.wrapped(one)]


def explain_lines(plan: TrainingPlan) -> list[str]:
    """Say in one screen which settings mattered most, and what speaks against the others."""
    frozen, memory = plan.frozen, words.MEMORY[plan.frozen.hardware.device_kind]
    budget = text.memory_text(frozen.hardware.budget_bytes)
    by_knob: dict[str, list[points.Worth]] = {}
    for worth in points.find_worths(plan, points.points_of(plan)):
        by_knob.setdefault(worth.knob, []).append(worth)
    told: list[tuple[float, str, str]] = []
    for knob, worths in by_knob.items():
        running = [worth for worth in worths if worth.point.runs] or worths
        best = max(running, key=lambda worth: worth.speed)
        line = f"with {best.value}: {_difference_text(best, frozen.expected, memory)}"
        weight = abs(best.speed)
        for worth in worths:
            plain = words.setting_text(knob, SAVES_NOTHING.get(knob, ""))
            if worth.value == plain and not worth.point.runs:
                size = text.memory_text(worth.point.run_memory_bytes)
                weight, line = 1.0, f"with {worth.value}: {size} {memory}, {budget} may be taken"
        told.append((weight, knob, line))
    for reason in frozen.reasons:
        if reason.knob == "caching" and frozen.caching != CachingSettings() and reason.rejected:
            other = reason.rejected[0]
            told.append((1.0, reason.knob, f"{other.choice}: {other.reason}"))
        elif reason.knob not in by_knob:
            told.append((0.0, reason.knob, reason.why))
    values = dict(zip((*Candidate.model_fields, "caching"), settings_items(plan), strict=True))
    lines = []
    for _, knob, line in sorted(told, reverse=True)[: run.MAX_REASONS]:
        lines += [" ".join(values[knob]), *text.wrapped(f"    {line}", 0)]
    return lines


def _difference_text(worth: points.Worth, expected: Expected, memory: str) -> str:
    outcome, kind = worth.point.outcome, worth.point.kind
    if kind == "failed":
        return outcome.partition(" (")[0]
    told = f"{abs(worth.speed):.0%} {'faster' if worth.speed > 0 else 'slower'}"
    told = "as fast" if told.startswith("0%") else told
    if abs(worth.memory_bytes) > 0.01 * expected.run_memory_bytes:
        more = "more" if worth.memory_bytes > 0 else "less"
        told += f", {text.memory_text(abs(worth.memory_bytes))} {more} {memory}"
    return f"{told} ({kind if worth.point.runs else outcome})"


def every_reason_lines(plan: TrainingPlan) -> list[str]:
    """Explain why each setting was chosen, and what was rejected and why, as the plan names it."""
    texts = []
    for reason in plan.frozen.reasons:
        texts.append(f"{reason.knob} = {reason.chosen}: {reason.why}")
        texts += [f"    not {rejected.choice}: {rejected.reason}" for rejected in reason.rejected]
    lines = [part for one in (*texts, *assumption_text(plan)) for part in text.wrapped(one, 4)]
    if plan.frozen.trials:
        lines += ["", "trials", run.TRIAL_HEADER]
    for number, trial in enumerate(plan.frozen.trials, 1):
        lines += run.trial_lines(number, trial, plan.frozen.trials[0])
        lines += text.wrapped(f"      {trial.message}") if trial.message else []
    if plan.frozen.fallbacks:
        lines += ["", "if memory is shorter than planned, in this order"]
    for fallback in plan.frozen.fallbacks:
        lines += text.wrapped(f"    {words.label_of(dict(fallback))}", 4)
    return lines


def origin_lines(plan: TrainingPlan) -> list[str]:
    """List what `you set` and `we set`; a value equal to the default counts as ours."""
    return [
        f"{'' if number else title:<9} {line}"
        for title, ours in (("you set", False), ("we set", True))
        for number, line in enumerate(_user_or_default(plan, ours=ours))
    ]


def _user_or_default(plan: TrainingPlan, *, ours: bool) -> list[str]:
    from autotune.knobs.settings import usual_learning_rate
    from autotune.models.facts import VIEWS_PER_IMAGE
    from autotune.models.registry import get_family

    job, work, optimizer = plan.job, plan.frozen.workload, plan.frozen.workload.optimizer
    usual = get_family(work.model.family).defaults
    num_images = sum(bucket.num_items for bucket in work.buckets)
    steps = usual.num_steps(num_images, work.effective_batch_size)
    named = " ".join([optimizer.name, *(f"{n}={v}" for n, v in optimizer.options)])
    rate = usual_learning_rate(optimizer, usual.learning_rate)
    is_adamw, scripts = optimizer.name == "adamw", "diffusers' scripts"
    why = usual.sources
    rate_source = why.get("learning_rate") if is_adamw else f"usual for {optimizer.name}"
    batch = usual.batch_for(plan.frozen.hardware.num_processes)
    decay, density = "between diffusers' 1e-4 and torch's 1e-2", usual.timestep_sampling
    views = f"{VIEWS_PER_IMAGE} views of each image, 500 in all or more"
    num_steps = job.num_steps if job.num_train_epochs is None else None
    alpha, guidance = usual.lora_alpha * work.rank / usual.rank, usual.training_guidance
    values: list[tuple[str, Any, Any, str | None]] = [
        ("resolution", work.resolution_px, usual.resolution_px, "the published model's"),
        ("adapted layers", work.targets, "attention", scripts),
        ("blocks", work.adapted_blocks, "all", scripts),
        ("adapter", work.adapter, "lora", scripts),
        ("average", work.ema_decay, 0.0, scripts),
        ("rank", work.rank, usual.rank, why.get("rank")),
        ("alpha", work.lora_alpha, alpha, "in proportion to the rank"),
        ("dropout", work.lora_dropout, 0.0, scripts),
        ("preserved prior", work.preserve_prior, 0.0, scripts),
        ("optimizer", named, "adamw", "AdamW in fp32"),
        ("batch", work.effective_batch_size, batch, "our choice"),
        ("steps", num_steps, steps, views),
        ("epochs", job.num_train_epochs, None, None),
        ("learning rate", job.learning_rate, rate, rate_source),
        ("weight decay", job.weight_decay, usual.weight_decay, decay),
        ("noise levels", job.timestep_sampling, density, DENSITIES.get(density)),
        ("shift", job.timestep_shift, usual.timestep_shift, why.get("timestep_shift")),
        ("guidance", job.guidance_scale, guidance, why.get("training_guidance")),
    ]
    shown = []
    for name, value, default, source in values:
        if value is not None and (value == default) is ours:
            written = f"{value:g}" if isinstance(value, float) else str(value)
            shown.append(f"{name} {written}" + (f"  ({source})" if ours and source else ""))
    return shown


@dataclass(frozen=True)
class Difference:
    """One thing that differs between two plans; of a quantity the ratio of second to first, too."""

    name: str
    first: str | int | float | None
    second: str | int | float | None
    ratio: float | None = None
    first_uncertainty: float | None = None  # standard error as a share, of predicted times
    second_uncertainty: float | None = None


def differences(
    first: TrainingPlan, second: TrainingPlan, *, price_per_hour: float | None = None
) -> tuple[Difference, ...]:
    """Return what differs, in the order of a plan's report. Units are in the names."""
    ours, theirs = (_facts(plan, price_per_hour) for plan in (first, second))
    doubts = [plan.frozen.expected.time_uncertainty for plan in (first, second)]
    found = []
    for name, a in ours.items():
        if a != (b := theirs[name]):
            is_ratio = name.endswith(QUANTITIES) and a and b is not None
            ratio: Any = b / a if is_ratio else None  # type: ignore[operator]
            is_time = name in ("step_seconds", "image_seconds", "run_seconds")
            found.append(Difference(name, a, b, ratio, *(doubts if is_time else ())))
    return tuple(found)


def _facts(plan: TrainingPlan, price_per_hour: float | None) -> dict[str, str | int | float | None]:
    frozen, expected, work = plan.frozen, plan.frozen.expected, plan.frozen.workload
    largest = work.largest_bucket
    asked = {f"workload.{name}": value for name, value in work if name not in ("model", "buckets")}
    cost = {} if price_per_hour is None else {"cost": plan.cost_at(price_per_hour)}
    return {
        "model": work.model.name,
        "device": frozen.hardware.device_name,
        **asked,
        "workload.largest_bucket": f"{largest.width_px}x{largest.height_px}x{largest.num_frames}",
        **{f"settings.{name}": value for name, value in frozen.settings},
        "evidence": expected.evidence,
        "run_memory_bytes": expected.run_memory_bytes,
        "step_memory_bytes": expected.peak_memory_bytes,
        "step_seconds": expected.step_seconds,
        "image_seconds": expected.step_seconds / work.effective_batch_size,
        "num_steps": plan.job.num_steps,
        "run_seconds": plan.job_seconds,
        **cost,
        "search_seconds": frozen.search_seconds,
    }


def difference_lines(found: Sequence[Difference]) -> list[str]:
    """Align differences for people."""

    def shown(name: str, value: Any, doubt: float | None) -> str:
        if name.startswith("settings."):
            return words.value_text(name.removeprefix("settings."), value)
        if name.endswith("_bytes") and isinstance(value, int):
            return text.memory_text(value)
        if name.endswith("_seconds") and isinstance(value, float):
            form = text.seconds_text if doubt is None else text.rough_seconds
            return text.range_text(value, doubt, form)
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = []
    for item in found:
        name = item.name.rpartition(".")[2]
        title = DIFFERING.get(item.name) or words.TITLES.get(name) or name.replace("_", " ")
        first = shown(item.name, item.first, item.first_uncertainty)
        second = shown(item.name, item.second, item.second_uncertainty)
        ratio = item.ratio
        times = "" if ratio is None else f" {ratio:{'.2f' if ratio >= 0.1 else '.2g'}}x"
        line = f"{title:<22} {first:>20} -> {second:<20}{times}".rstrip()
        split = [*text.wrapped(title), *text.wrapped(f"    {first} -> {second}{times}", 0)]
        lines += [line] if max(map(len, (title, first, second))) <= 22 else split
    return lines or ["the plans do not differ"]


def knob_lines(space: SearchSpace) -> list[str]:
    """List the choices of every knob, and exclusions with reasons."""
    lines = []
    for name, choices in space.choices.items():
        lines.append(f"{name}: {_values_text(choices)}")
        against: dict[tuple[str, str], list[Choice]] = {}
        for one in space.rejected.get(name, ()):
            refusal = "not always" if one.choice in choices else "not"
            word = "to pin" if one.choice in space.pinnable[name] else refusal
            against.setdefault((word, one.reason), []).append(one.choice)
        for (word, reason), values in against.items():
            lines.append(f"    {word} {_values_text(values)}: {reason}")
    return [part for line in lines for part in text.wrapped(line, 4)]


def _values_text(values: Sequence[Choice]) -> str:
    numbers = sorted(value for value in values if isinstance(value, int))
    if len(numbers) == len(values) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, values))
