"""Text about plans and trials for a terminal of 80 columns; two plans side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.events import CandidatesPredicted, RecordsMatched
from autotune.plan.candidate import CachingSettings, Candidate, Choice, TrialResult
from autotune.plan.plan import CheckResult, TrainingPlan
from autotune.plan.workload import Bucket, Workload, mean_text_tokens
from autotune.report.text import (
    capped,
    count_text,
    memory_text,
    plus_minus,
    printable,
    seconds_text,
    with_command,
    wrapped,
)

if TYPE_CHECKING:
    from autotune.search.space import SearchSpace

TRIAL_HEADER = " # batch  s/step  step mem outcome   settings besides the defaults"
SETTINGS_COLUMN = TRIAL_HEADER.index("settings")
# Settings that have a column of their own, or that no two trials are compared for.
UNTOLD = ("micro_batch_size", "allocator", "data_workers", "batch_memory")
MAX_SETTINGS = 10  # so that the whole answer has at most 25 lines
MAX_SIZES = 8
MAX_REASONS = 5
WORTH_TELLING = 1.05  # gain from more memory that is named
DENSITIES = {
    "logit_normal": "Stable Diffusion 3's density",
    "uniform": "the model's own noise schedule",
}
# So end the names of what is measured, not chosen, and compared by its ratio.
QUANTITIES = ("_bytes", "_seconds", "images_per_second", "num_steps", "cost")


def trial_lines(number: int, result: TrialResult, first: TrialResult) -> list[str]:
    """Align a trial under TRIAL_HEADER; its settings are those that differ from the first's."""
    verdict: str = result.outcome
    if verdict == "ok" and result.confirms:
        verdict = "confirmed"
    elif verdict == "ok" and result.candidate.compile != "off":
        verdict = "compiled"
    measures = result.median_step_seconds, result.peak_memory_bytes
    return _row(number, dict(result.candidate), dict(first.candidate), *measures, verdict)


def _row(
    number: int,
    values: Mapping[str, Choice],
    first: Mapping[str, Choice],
    seconds: float | None,
    num_bytes: int | None,
    verdict: str,
) -> list[str]:
    time, memory = "-" if seconds is None else f"{seconds:.3f}", memory_text(num_bytes)
    if num_bytes is not None and num_bytes >= 100 * 2**30:  # in at most nine columns
        memory = f"{num_bytes / 2**30:.{1 if num_bytes < 1000 * 2**30 else 0}f} GiB"
    figures = f"{number:>2} {values['micro_batch_size']:>5} {time:>7} {memory:>9} {verdict:<9}"
    defaults = {name: field.default for name, field in Candidate.model_fields.items()}
    known = defaults if number == 1 else first
    told = ((name, value) for name, value in values.items() if name not in UNTOLD)
    differing = (f"{name}={value}" for name, value in told if value != known[name])
    changed = ", ".join(differing)  # as `--pin` takes them
    settings = changed or "-" if number == 1 else f"as 1 but {changed}" if changed else "as 1"
    return wrapped(f"{figures} {settings}", SETTINGS_COLUMN - (number < 10))


def workload_lines(workload: Workload, num_candidates: int) -> list[str]:
    """Describe the workload that is planned for."""
    model, largest = workload.model, workload.largest_bucket
    count = sum(b.num_items for b in workload.buckets)
    sizes = [f"{_size(b)} ({b.num_items})" for b in workload.buckets]
    kind = "image" if largest.num_frames == 1 else "clip"
    data = f"{count} {kind}s: {', '.join(capped(sizes, MAX_SIZES, ' sizes'))}"
    longest, usual = workload.max_text_tokens, mean_text_tokens(workload)
    captions = f"captions up to {longest} tokens, {usual} on average"
    if usual >= longest - 1:  # padded to one length, or assumed
        captions = f"each caption as {longest} tokens"
    lines = [
        f"model     {model.name} ({model.family}, {count_text(model.num_parameters)} parameters)",
        f"data      {data if count > 1 else f'one {kind} of {_size(largest)}'}; {captions}",
        f"learning  rank {workload.rank}, effective batch {workload.effective_batch_size}",
        f"search    {num_candidates} candidates",
    ]
    return [part for line in lines for part in wrapped(line, 10)]


def _size(bucket: Bucket) -> str:
    frames = f"x{bucket.num_frames}" if bucket.num_frames > 1 else ""
    return f"{bucket.width_px}x{bucket.height_px}{frames}"


def prediction_lines(event: CandidatesPredicted) -> list[str]:
    """Show the fastest few candidates that are predicted to fit, the chosen, and the fastest few
    that do not fit."""
    budget_bytes = event.budget_bytes
    ordered = sorted(event.predictions, key=lambda prediction: prediction.step_seconds)
    fitting = [p for p in ordered if p.run_memory_bytes <= budget_bytes]
    others = [p for p in ordered if p.run_memory_bytes > budget_bytes]
    if not fitting:
        others.sort(key=lambda prediction: prediction.run_memory_bytes)
    times = f"; times{plus_minus(ordered[0].time_uncertainty)}" if ordered else ""
    budget = memory_text(budget_bytes)
    lines = [
        f"{len(fitting)} of {len(ordered)} candidates are predicted to fit in {budget}{times}",
        TRIAL_HEADER.replace("step mem outcome", " run mem verdict"),
    ]
    chosen = [each for each in fitting[5:] if each.candidate == event.chosen]
    shown = [*fitting[:5], *chosen, *others[:3]]
    first = dict(shown[0].candidate) if shown else {}
    for number, each in enumerate(shown, 1):
        neediest = max(each.phases, key=lambda phase: phase.run_memory_bytes, default=None)
        fits = each.run_memory_bytes <= budget_bytes
        verdict = "fits" if fits or neediest is None else f"no: {neediest.name}"
        verdict = "chosen" if each.candidate == event.chosen else verdict
        measures = each.step_seconds, each.run_memory_bytes
        lines += _row(number, dict(each.candidate), first, *measures, verdict)
    return lines


def records_lines(event: RecordsMatched) -> list[str]:
    """Tell what earlier measurements contribute."""
    found = {
        "exact": "measured before on such a machine: one trial will verify it",
        "near": f"{event.num_records} of similar machines or work start the search",
    }
    texts = [found[event.kind]] if event.kind in found else []
    texts += capped(event.refused, MAX_REASONS, ": `autotune profiles verify`")
    return [note_text(text, "records") for text in texts]


def note_text(text: str, title: str = "note") -> str:
    """Align a remark with the lines before the first trial."""
    return "\n".join(wrapped(f"{title:<10}{text}", 10))


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
    return [part for line in lines for part in wrapped(line, 4)]


def _values_text(values: Sequence[Choice]) -> str:
    numbers = sorted(value for value in values if isinstance(value, int))
    if len(numbers) == len(values) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, values))


def process_workload(plan: TrainingPlan) -> Workload:
    """Return the work of one of the plan's processes."""
    return plan.frozen.workload.share(plan.frozen.hardware.num_processes)


def settings_items(plan: TrainingPlan) -> list[tuple[str, str]]:
    """Return every knob's title and its value in words."""
    from autotune.knobs.registry import KNOBS, TITLES

    known, work = {knob.name: knob for knob in KNOBS}, process_workload(plan)
    return [
        (TITLES[name], known[name].describe(value, work) if name in known else str(value))
        for name, value in plan.frozen.settings
    ]


def full_settings_lines(plan: TrainingPlan) -> list[str]:
    """List every setting, one per line."""
    from autotune.knobs.caching import describe_caching

    items = settings_items(plan)
    encoders = "encoders", describe_caching(plan.frozen.caching)
    return [f"{title:<14} {value}" for title, value in (*items, encoders)]


def plan_lines(plan: TrainingPlan) -> list[str]:
    """Answer in a few lines: unusual settings, speed, memory, time, and what would be faster."""
    frozen, expected, hardware = plan.frozen, plan.frozen.expected, plan.frozen.hardware
    number = hardware.num_processes
    batch, size = frozen.workload.effective_batch_size, frozen.settings.micro_batch_size
    passes = f"{size} a forward pass x {batch // number // size} accumulated"
    facts = [("batch size", f"{batch} = {passes} x {number} process{'es' * (number > 1)}")]
    facts += [("" if at else "settings", text) for at, text in enumerate(_unusual_settings(plan))]
    if number > 1:
        facts.append(("processes", f"{number}, one per device ({hardware.strategy})"))
    took = seconds_text(expected.step_seconds) + plus_minus(expected.time_uncertainty)
    speed = f"{expected.images_per_second:.2f} images/s ({expected.evidence})"
    needs = f"{memory_text(expected.run_memory_bytes)} in the phase that needs most"
    left = memory_text(hardware.budget_bytes - expected.run_memory_bytes)
    step_memory, budget = map(memory_text, (expected.peak_memory_bytes, hardware.budget_bytes))
    facts += [
        ("speed", f"{took} per step, {speed}"),
        ("memory", f"{needs}, {step_memory} in a step; {left} of {budget} are left"),
    ]
    if expected.host_memory_bytes is not None:
        own = f"{memory_text(number * expected.host_memory_bytes)} of the computer's own"
        together = f" for {number} processes" if number > 1 else ""
        facts.append(("host memory", f"{own}{together}, in the neediest phase"))
    facts.append(("the job", job_text(plan)))
    count = len(frozen.trials)
    search = f"{count} trial{'s' * (count > 1)} in {seconds_text(frozen.search_seconds)}"
    if expected.evidence == "predicted":
        search = "predictions alone; nothing has run"
    facts += [("the search", search), *_what_is_faster(plan)]
    notes = [*assumption_text(plan), *([frozen.overheads.text] if frozen.overheads else [])]
    notes += frozen.advice
    if caps := [t.memory_cap_bytes for t in frozen.trials if t.memory_cap_bytes is not None]:
        within = f"tried within {memory_text(max(caps))}, as you asked"
        notes.append(f"{within}: never shared as evidence")
    facts += [("note", note) for note in notes]
    return [part for title, text in facts for part in wrapped(f"{title:<14} {text}", 15)]


def _unusual_settings(plan: TrainingPlan) -> list[str]:
    from autotune.knobs.caching import describe_caching

    settings = plan.frozen.settings
    plain = Candidate(micro_batch_size=settings.micro_batch_size, checkpointed_blocks=0)
    names = settings.differences(plain)
    items = zip(Candidate.model_fields, settings_items(plan), strict=True)
    shown = [f"{title} {text}" for name, (title, text) in items if name in names]
    if plan.frozen.caching != CachingSettings():
        shown.append(f"encoders {describe_caching(plan.frozen.caching)}")
    return capped(shown, MAX_SETTINGS, ": `autotune explain` shows all")


def _what_is_faster(plan: TrainingPlan) -> list[tuple[str, str]]:
    forecast, seconds = plan.frozen.forecast, plan.frozen.expected.step_seconds
    budget = plan.frozen.hardware.budget_bytes
    beyond = [
        each
        for each in (forecast.alternatives if forecast else ())
        if each.run_memory_bytes > budget and each.step_seconds < seconds / WORTH_TELLING
    ]
    if not beyond:
        return []
    least = min(beyond, key=lambda alternative: alternative.run_memory_bytes)
    more, gain = memory_text(least.run_memory_bytes - budget), seconds / least.step_seconds
    other = f"other settings are predicted to be {gain:.2f}x as fast"
    return [("faster", f"with {more} more memory {other}")]


def train_hint(plan: TrainingPlan, file: Path) -> str:
    """Tell where the plan was written, and the command that trains it."""
    frozen, words = plan.frozen, ["autotune", "train", str(file)]
    words += ["--data", "FOLDER"] if plan.job.data is None else []
    if frozen.workload.num_control_images and plan.job.control is None:
        words += ["--control", "FOLDER"]
    is_here = frozen.expected.evidence != "predicted"
    hint = "train it with:" if is_here else f"on {frozen.hardware.device_name} train it with:"
    lines = with_command(f"written to {file}; {hint}", shlex.join(words))
    if len(lines) > 1:  # file and command stay whole, each on its own line
        lines = [f"written to {printable(str(file))}", *with_command(hint, shlex.join(words))]
    return "\n".join(lines)


def job_text(plan: TrainingPlan) -> str:
    """Tell the job's time from loading to the last checkpoint, and its cost if that is known."""
    expected, number = plan.frozen.expected, plan.frozen.hardware.num_processes
    epochs = "" if plan.job.num_train_epochs is None else f"{plan.job.num_train_epochs} epochs, "
    if epochs and plan.job.data is None:
        return f"{epochs}as many steps as they take of the data"
    price = ""
    if (cost := plan.job_cost) is not None:
        gpus = f"{number} GPUs, each " if number > 1 else ""
        price = f", {cost:.2f} for {gpus}{expected.price_per_hour:.2f} an hour"
    total = seconds_text(plan.job_seconds) + plus_minus(expected.time_uncertainty)
    return f"{epochs}{plan.job.num_steps} steps, {total} in all{price}"


def assumption_text(plan: TrainingPlan) -> list[str]:
    """Tell what the plan takes for granted of a machine that it was not made on."""
    if not (packages := ", ".join(plan.frozen.hardware.assumed)):
        return []
    later = "nothing was measured, `train` does it here"
    return [f"assumed: {packages} installed, and as fast as published; {later}"]


def check_lines(result: CheckResult, plan_file: str, machine: str = "this machine") -> list[str]:
    """Tell that the plan of this file fits the machine, or each reason why it does not."""
    if result.fits:
        return [f"{plan_file} is valid and fits {machine}"]
    texts = [f"does not fit {machine}: {misfit}" for misfit in result.misfits]
    return [line for text in texts for line in wrapped(text)]


def explain_lines(plan: TrainingPlan) -> list[str]:
    """Explain why each setting was chosen, and what was rejected and why."""
    texts = []
    for reason in plan.frozen.reasons:
        texts.append(f"{reason.knob} = {reason.chosen}: {reason.why}")
        texts += [f"    not {rejected.choice}: {rejected.reason}" for rejected in reason.rejected]
    lines = [part for text in (*texts, *assumption_text(plan)) for part in wrapped(text, 4)]
    if plan.frozen.trials:
        lines += ["", "trials", TRIAL_HEADER]
    for number, trial in enumerate(plan.frozen.trials, 1):
        lines += trial_lines(number, trial, plan.frozen.trials[0])
        lines += wrapped(f"      {trial.message}") if trial.message else []
    if plan.frozen.fallbacks:
        lines += ["", "if memory is shorter than planned, in this order"]
    for fallback in plan.frozen.fallbacks:
        lines += wrapped(f"    {fallback.label()}", 4)
    return lines


def origin_lines(plan: TrainingPlan) -> list[str]:
    """List what `you set` and `we set`; a value equal to the default counts as ours."""
    return [
        f"{'' if number else title:<9} {text}"
        for title, ours in (("you set", False), ("we set", True))
        for number, text in enumerate(_user_or_default(plan, ours=ours))
    ]


def user_values_line(plan: TrainingPlan) -> list[str]:
    """Tell what the user set, in one line."""
    values = ", ".join(_user_or_default(plan, ours=False))
    return wrapped(f"{'you set':<15}{values}", 15) if values else []


def _user_or_default(plan: TrainingPlan, *, ours: bool) -> list[str]:
    from autotune.knobs.settings import usual_learning_rate
    from autotune.models.facts import VIEWS_PER_IMAGE
    from autotune.models.registry import get_family

    job, work, optimizer = plan.job, plan.frozen.workload, plan.frozen.workload.optimizer
    usual = get_family(work.model.family).defaults
    steps = usual.num_steps(sum(bucket.num_items for bucket in work.buckets))
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
            text = f"{value:g}" if isinstance(value, float) else str(value)
            shown.append(f"{name} {text}" + (f"  ({source})" if ours and source else ""))
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
            is_time = name in ("step_seconds", "run_seconds")
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
        "images_per_second": expected.images_per_second,
        "num_steps": plan.job.num_steps,
        "run_seconds": plan.job_seconds,
        **cost,
        "search_seconds": frozen.search_seconds,
    }


def difference_lines(found: Sequence[Difference]) -> list[str]:
    """Align differences for people."""

    def shown(name: str, value: str | int | float | None, doubt: float | None) -> str:
        if name.endswith("_bytes") and isinstance(value, int):
            return memory_text(value)
        if name.endswith("_seconds") and isinstance(value, float):
            return seconds_text(value) + plus_minus(doubt)
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = []
    for item in found:
        title = item.name.rpartition(".")[2].removesuffix("_bytes").removesuffix("_seconds")
        first = shown(item.name, item.first, item.first_uncertainty)
        second = shown(item.name, item.second, item.second_uncertainty)
        ratio = item.ratio
        times = "" if ratio is None else f" {ratio:{'.2f' if ratio >= 0.1 else '.2g'}}x"
        line = f"{title.replace('_', ' '):<24} {first:>20} -> {second:<20}{times}"
        lines.append(line.rstrip())
    return lines or ["the plans do not differ"]
