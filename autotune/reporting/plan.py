"""A plan and its trials as text for a terminal of 80 columns; two plans side by side."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.families import VIEWS_PER_IMAGE, get_family
from autotune.knobs import KNOBS, TITLES, describe_caching, usual_learning_rate
from autotune.reporting.text import (
    capped,
    count_text,
    memory_text,
    printable,
    seconds_text,
    uncertainty_text,
    with_command,
    wrapped,
)
from autotune.schema import (
    Bucket,
    CachingSettings,
    Candidate,
    CheckResult,
    Choice,
    Prediction,
    RecordsMatched,
    TrainingPlan,
    TrialResult,
    Workload,
    differences_of,
    mean_text_tokens,
)
from autotune.search import SearchSpace

TRIAL_HEADER = " # batch  s/step  step mem outcome   settings besides the defaults"
SETTINGS_COLUMN = TRIAL_HEADER.index("settings")
UNTOLD = ("micro_batch_size", "allocator", "data_workers", "batch_memory")
"""Knobs that have a column of their own, or that no two trials are compared for."""


def trial_lines(number: int, result: TrialResult, first: Candidate) -> list[str]:
    """A trial aligned under TRIAL_HEADER, with its settings as they differ from those of the
    first trial.
    """
    succeeded = (
        "confirmed"
        if result.confirms
        else "ok"
        if result.candidate.compile == "off"
        else "compiled"
    )
    verdict = succeeded if result.outcome == "ok" else result.outcome
    return _row(
        number,
        result.candidate,
        first,
        (result.median_step_seconds, result.peak_memory_bytes),
        verdict,
    )


def _row(
    number: int,
    candidate: Candidate,
    first: Candidate,
    measures: tuple[float | None, int | None],
    verdict: str,
) -> list[str]:
    seconds, memory_bytes = measures
    time = "-" if seconds is None else f"{seconds:.3f}"
    figures = (
        f"{number:>2} {candidate.micro_batch_size:>5} {time:>7} "
        f"{_narrow_memory(memory_bytes):>9} "
        f"{verdict:<9}"
    )
    defaults = {name: field.default for name, field in Candidate.model_fields.items()}
    changed = _told(candidate, defaults if number == 1 else dict(first))
    settings = changed or "-" if number == 1 else f"as 1 but {changed}" if changed else "as 1"
    return wrapped(f"{figures} {settings}", SETTINGS_COLUMN - (number < 10))


def _told(candidate: Candidate, known: Mapping[str, Choice]) -> str:
    """The settings that are others than those known, under the names that `--pin` takes."""
    return ", ".join(
        f"{name}={value}"
        for name, value in candidate
        if name not in UNTOLD and value != known[name]
    )


def _narrow_memory(memory_bytes: int | None) -> str:
    """In at most nine columns."""
    if memory_bytes is None or memory_bytes < 100 * 2**30:
        return memory_text(memory_bytes)
    return f"{memory_bytes / 2**30:.{1 if memory_bytes < 1000 * 2**30 else 0}f} GiB"


def workload_lines(workload: Workload, num_candidates: int) -> list[str]:
    """The workload that is planned for, shown before the first trial."""
    model, largest = workload.model, workload.largest_bucket
    count = sum(b.num_items for b in workload.buckets)
    sizes = ", ".join(
        capped([f"{_size(b)} ({b.num_items})" for b in workload.buckets], MAX_SIZES, " sizes")
    )
    kind = "image" if largest.num_frames == 1 else "clip"
    data = f"{count} {kind}s: {sizes}" if count > 1 else f"one {kind} of {_size(largest)}"
    longest, usual = workload.max_text_tokens, mean_text_tokens(workload)
    captions = f"captions up to {longest} tokens" + (
        f", {usual} on average" if usual < longest else ""
    )
    lines = [
        f"model     {model.name} ({model.family}, {count_text(model.num_parameters)} parameters)",
        f"data      {data}; {captions}",
        f"learning  rank {workload.rank}, effective batch {workload.effective_batch_size}",
        f"search    {num_candidates} candidates",
    ]
    return [part for line in lines for part in wrapped(line, 10)]


def _size(bucket: Bucket) -> str:
    frames = f"x{bucket.num_frames}" if bucket.num_frames > 1 else ""
    return f"{bucket.width_px}x{bucket.height_px}{frames}"


def prediction_lines(predictions: Sequence[Prediction], budget_bytes: int) -> list[str]:
    """The best few candidates that are predicted to fit, and the fastest few that are not."""
    ordered = sorted(predictions, key=lambda prediction: prediction.step_seconds)
    fitting = [p for p in ordered if p.run_memory_bytes <= budget_bytes]
    others = [p for p in ordered if p.run_memory_bytes > budget_bytes]
    times = f"; times{uncertainty_text(ordered[0].time_uncertainty)}" if ordered else ""
    lines = [
        f"{len(fitting)} of {len(ordered)} candidates are predicted to fit in "
        f"{memory_text(budget_bytes)}{times}"
    ]
    lines.append(TRIAL_HEADER.replace("step mem outcome", " run mem verdict"))
    nearest = sorted(others, key=lambda prediction: prediction.run_memory_bytes)
    rows = [(p, "fits") for p in fitting[:5]] + [
        (p, _neediest(p)) for p in (others if fitting else nearest)[:3]
    ]
    for number, (prediction, verdict) in enumerate(rows, 1):
        measures = prediction.step_seconds, prediction.run_memory_bytes
        lines += _row(number, prediction.candidate, rows[0][0].candidate, measures, verdict)
    return lines


def _neediest(prediction: Prediction) -> str:
    phase = max(prediction.phases, key=lambda phase: phase.run_memory_bytes)
    return f"no: {phase.name}"


MAX_SETTINGS = 10
"""Settings that differ from the defaults and are shown one by one: the whole answer has at most
25 lines.
"""
WORTH_TELLING = 1.05
"""Gain from more memory that is named."""
MAX_SIZES = 8
"""Sizes of images that are named one by one."""
MAX_REASONS = 5
"""Records of a kind that are named one by one."""


def records_lines(event: RecordsMatched) -> list[str]:
    """What earlier measurements contribute, and which no longer count; nothing if there are
    none.
    """
    found = {
        "exact": "measured before on such a machine: one trial will verify it",
        "upgraded": (
            "measured here before an upgrade: a trial or two will tell whether it still holds"
        ),
        "near": f"{event.num_records} of similar machines or work start the search",
    }
    texts = [found[event.kind]] if event.kind in found else []
    for reasons, command in ((event.stale, "list --why"), (event.refused, "verify")):
        texts += capped(reasons, MAX_REASONS, f": `autotune profiles {command}`")
    lines = [note_text(text, "records") for text in texts]
    return [*lines, ""] if lines else []


def note_text(text: str, title: str = "note") -> str:
    """A remark, aligned with the lines before the first trial."""
    return "\n".join(wrapped(f"{title:<10}{text}", 10))


def knob_lines(space: SearchSpace) -> list[str]:
    """Choices of every knob, and exclusions with reasons."""
    lines = []
    for name, choices in space.choices.items():
        lines.append(f"{name}: {_values_text(choices)}")
        against: dict[tuple[str, str], list[Choice]] = {}
        for one in space.rejected.get(name, ()):
            refusal = "not always" if one.choice in choices else "not"
            word = "to pin" if one.choice in space.on_request[name] else refusal
            against.setdefault((word, one.reason), []).append(one.choice)
        lines += [
            f"    {word} {_values_text(values)}: {reason}"
            for (word, reason), values in against.items()
        ]
    return [part for line in lines for part in wrapped(line, 4)]


def _values_text(values: Sequence[Choice]) -> str:
    """Values after commas; many numbers without a gap as the first and the last."""
    numbers = sorted(value for value in values if isinstance(value, int))
    if len(numbers) == len(values) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, values))


def process_workload(plan: TrainingPlan) -> Workload:
    """The work of one of the plan's processes."""
    return plan.frozen.workload.share(plan.frozen.hardware.num_processes)


def settings_items(settings: Candidate, workload: Workload) -> list[tuple[str, str]]:
    """Every knob's title and its value in words."""
    known = {knob.name: knob for knob in KNOBS}
    return [
        (TITLES[name], known[name].describe(value, workload) if name in known else str(value))
        for name, value in settings
    ]


def describe_changes(candidate: Candidate, settings: Candidate) -> str:
    """What differs from other settings, in a few words; empty if nothing does."""
    changes = differences_of(candidate, settings)
    return ", ".join(f"{TITLES[name]} {value}" for name, value in changes.items())


def plan_lines(plan: TrainingPlan) -> list[str]:
    """The answer in a few lines: what is not as usual, speed, memory, total time, and what would
    be faster.
    """
    expected, hardware = plan.frozen.expected, plan.frozen.hardware
    left = hardware.budget_bytes - expected.run_memory_bytes
    several = f"processes      {hardware.num_processes}, one per device ({hardware.strategy})"
    lines = [
        *(
            f"{'' if number else 'settings':<14} {text}"
            for number, text in enumerate(_unusual_settings(plan))
        ),
        *([several] if hardware.num_processes > 1 else ()),
        "speed          "
        f"{seconds_text(expected.step_seconds)}{uncertainty_text(expected.time_uncertainty)} per "
        "step,"
        f" {expected.images_per_second:.2f} images/s ({expected.evidence})",
        f"memory         {memory_text(expected.run_memory_bytes)} in the phase that needs most, "
        f"{memory_text(expected.peak_memory_bytes)} in a step; {memory_text(left)} of "
        f"{memory_text(hardware.budget_bytes)} are left",
        *_host_line(plan),
        job_line(plan),
        _search_line(plan),
        *_faster_line(plan),
        *_notes(plan),
    ]
    return [part for line in lines for part in wrapped(line, 15)]


def _unusual_settings(plan: TrainingPlan) -> list[str]:
    """The micro-batch, and whatever differs from a knob's default."""
    settings, work = (
        plan.frozen.settings,
        plan.frozen.workload.share(plan.frozen.hardware.num_processes),
    )
    plain = Candidate(micro_batch_size=settings.micro_batch_size, checkpointed_blocks=0)
    names = {"micro_batch_size", *differences_of(settings, plain)}
    shown = [
        f"{title} {text}"
        for name, (title, text) in zip(
            Candidate.model_fields, settings_items(settings, work), strict=True
        )
        if name in names
    ]
    if plan.frozen.caching != CachingSettings():
        shown.append(f"encoders {describe_caching(plan.frozen.caching)}")
    return capped(shown, MAX_SETTINGS, ": `autotune explain` shows all")


def full_settings_lines(plan: TrainingPlan) -> list[str]:
    """Every setting, one per line."""
    items = settings_items(
        plan.frozen.settings, plan.frozen.workload.share(plan.frozen.hardware.num_processes)
    )
    listed = [f"{title:<14} {value}" for title, value in items]
    return [*listed, f"encoders       {describe_caching(plan.frozen.caching)}"]


def _host_line(plan: TrainingPlan) -> list[str]:
    each, number = plan.frozen.expected.host_memory_bytes, plan.frozen.hardware.num_processes
    if each is None:
        return []
    together = f" for {number} processes" if number > 1 else ""
    return [
        f"host memory    {memory_text(number * each)} of the computer's own{together}, in the "
        "neediest phase"
    ]


def _faster_line(plan: TrainingPlan) -> list[str]:
    """How much more memory would make it how much faster, by the smallest amount that does."""
    frozen = plan.frozen
    if frozen.forecast is None:
        return []
    goal, budget = frozen.expected.step_seconds / WORTH_TELLING, frozen.hardware.budget_bytes
    beyond = [
        a
        for a in frozen.forecast.alternatives
        if a.run_memory_bytes > budget and a.step_seconds < goal
    ]
    if not beyond:
        return []
    least = min(beyond, key=lambda alternative: alternative.run_memory_bytes)
    gain = frozen.expected.step_seconds / least.step_seconds
    more = memory_text(least.run_memory_bytes - budget)
    return [
        f"faster         with {more} more memory other settings are predicted to be {gain:.2f}x as "
        "fast"
    ]


def train_hint(plan: TrainingPlan, file: Path) -> str:
    """Where the plan was written, and the command that trains it, with what the plan does not
    name.
    """
    where = (
        f"on {plan.frozen.hardware.device_name} "
        if plan.frozen.expected.evidence == "predicted"
        else ""
    )
    return "\n".join(_written_lines(file, f"{where}train it with:", _train_words(plan, file)))


def _written_lines(file: Path, words: str, command: Sequence[str]) -> list[str]:
    """In one line if it is short enough; else file and command stay whole, each on its own line."""
    lines = with_command(f"written to {file}; {words}", shlex.join(command))
    return (
        lines
        if len(lines) == 1
        else [f"written to {printable(str(file))}", *with_command(words, shlex.join(command))]
    )


def _train_words(plan: TrainingPlan, file: Path) -> list[str]:
    job, words = plan.job, ["autotune", "train", str(file)]
    words += ["--data", "FOLDER"] if job.data is None else []
    return words + (
        ["--control", "FOLDER"]
        if plan.frozen.workload.num_control_images and job.control is None
        else []
    )


def job_line(plan: TrainingPlan) -> str:
    """How long the job will take, from loading to the last checkpoint, and its cost if the plan
    has a price.
    """
    cost = plan.job_cost
    number = plan.frozen.hardware.num_processes
    gpus = f"{number} GPUs, each " if number > 1 else ""
    price = (
        f", {cost:.2f} for {gpus}{plan.frozen.expected.price_per_hour:.2f} an hour"
        if cost is not None
        else ""
    )
    total = seconds_text(plan.job_seconds) + uncertainty_text(plan.frozen.expected.time_uncertainty)
    if plan.job.num_train_epochs is not None:  # how many steps they take, the data will tell
        return f"the job        {plan.job.num_train_epochs} epochs"
    return f"the job        {plan.job.num_steps} steps, {total} in all{price}"


def _notes(plan: TrainingPlan) -> list[str]:
    caps = [t.memory_cap_bytes for t in plan.frozen.trials if t.memory_cap_bytes is not None]
    capped = (
        [f"tried within {memory_text(max(caps))}, as you asked: never shared as evidence"]
        if caps
        else []
    )
    assumed = [
        *assumption_text(plan),
        *([plan.frozen.overheads.text] if plan.frozen.overheads else []),
    ]
    return [f"{'note':<15}{text}" for text in (*assumed, *plan.frozen.advice, *capped)]


def assumption_text(plan: TrainingPlan) -> list[str]:
    """What the plan takes for granted of a machine that it was not made on, in at most one
    sentence.
    """
    if not (packages := ", ".join(plan.frozen.hardware.assumed)):
        return []
    return [
        f"assumed: {packages} installed, and as fast as published; nothing was measured, `train` "
        "does it here"
    ]


def _search_line(plan: TrainingPlan) -> str:
    if plan.frozen.expected.evidence == "predicted":
        return "the search     predictions alone; nothing has run"
    count = sum(not trial.confirms for trial in plan.frozen.trials)
    return (
        f"the search     {count} trial{'s' * (count > 1)} in "
        f"{seconds_text(plan.frozen.search_seconds)}"
    )


def check_lines(result: CheckResult, plan_file: str, machine: str = "this machine") -> list[str]:
    """Whether the plan of this file fits the machine, or each reason why it does not."""
    if result.fits:
        return [f"{plan_file} is valid and fits {machine}"]
    return [
        line for misfit in result.misfits for line in wrapped(f"does not fit {machine}: {misfit}")
    ]


def explain_lines(plan: TrainingPlan) -> list[str]:
    """Why each setting was chosen and what was rejected, with the reason."""
    lines = []
    for reason in plan.frozen.reasons:
        lines.append(f"{reason.knob} = {reason.chosen}: {reason.why}")
        lines += [f"    not {rejected.choice}: {rejected.reason}" for rejected in reason.rejected]
    lines = [part for line in (*lines, *assumption_text(plan)) for part in wrapped(line, 4)]
    if plan.frozen.trials:
        lines += ["", "trials", TRIAL_HEADER]
    for number, trial in enumerate(plan.frozen.trials, 1):
        lines += trial_lines(number, trial, plan.frozen.trials[0].candidate)
        if trial.message:
            lines += wrapped(f"      {trial.message}")
    if plan.frozen.fallbacks:
        lines.append("")
        lines.append("if memory is shorter than planned, in this order")
        lines += [
            line for one in plan.frozen.fallbacks for line in wrapped(f"    {one.label()}", 4)
        ]
    return lines


DENSITIES = {
    "logit_normal": "Stable Diffusion 3's density",
    "uniform": "the model's own noise schedule",
}


def origin_lines(plan: TrainingPlan) -> list[str]:
    """`you set` and `we set`, a value per line; a value equal to the default counts as ours,
    whoever wrote it.
    """
    lines = []
    for title, ours in (("you set", False), ("we set", True)):
        lines += [
            f"{'' if number else title:<9} {text}"
            for number, text in enumerate(_user_or_default(plan, ours=ours))
        ]
    return lines


def user_values_line(plan: TrainingPlan) -> list[str]:
    """What the user set, in one line; nothing if that is nothing."""
    values = ", ".join(_user_or_default(plan, ours=False))
    return wrapped(f"{'you set':<15}{values}", 15) if values else []


def _user_or_default(plan: TrainingPlan, *, ours: bool) -> list[str]:
    """The values that are ours, with their source, or those that are the user's."""
    job, work = plan.job, plan.frozen.workload
    defaults = get_family(work.model.family).defaults
    images = sum(bucket.num_items for bucket in work.buckets)
    optimizer = work.optimizer
    usual_alpha = defaults.lora_alpha * work.rank / defaults.rank
    values = {
        "resolution": (work.resolution_px, defaults.resolution_px, "the published model's"),
        "adapted layers": (work.targets, "attention", "diffusers' scripts"),
        "blocks": (work.adapted_blocks, "all", "diffusers' scripts"),
        "adapter": (work.adapter, "lora", "diffusers' scripts"),
        "average": (work.ema_decay, 0.0, "diffusers' scripts"),
        "rank": (work.rank, defaults.rank, defaults.sources.get("rank")),
        "alpha": (work.lora_alpha, usual_alpha, "in proportion to the rank"),
        "dropout": (work.lora_dropout, 0.0, "diffusers' scripts"),
        "optimizer": (
            " ".join([optimizer.name, *(f"{n}={v}" for n, v in optimizer.options)]),
            "adamw",
            "AdamW in fp32",
        ),
        "batch": (
            work.effective_batch_size,
            defaults.batch_for(plan.frozen.hardware.num_processes),
            "our choice",
        ),
        "steps": (
            job.num_steps if job.num_train_epochs is None else None,
            defaults.num_steps(images),
            f"{VIEWS_PER_IMAGE} views of each image, 500 in all or more",
        ),
        "epochs": (job.num_train_epochs, None, None),
        "learning rate": (
            job.learning_rate,
            usual_learning_rate(optimizer, defaults.learning_rate),
            defaults.sources.get("learning_rate")
            if optimizer.name == "adamw"
            else f"usual for {optimizer.name}",
        ),
        "weight decay": (
            job.weight_decay,
            defaults.weight_decay,
            "between diffusers' 1e-4 and torch's 1e-2",
        ),
        "noise levels": (
            job.timestep_sampling,
            defaults.timestep_sampling,
            DENSITIES.get(defaults.timestep_sampling),
        ),
        "shift": (
            job.timestep_shift,
            defaults.timestep_shift,
            defaults.sources.get("timestep_shift"),
        ),
        "guidance": (
            job.guidance_scale,
            defaults.training_guidance,
            defaults.sources.get("training_guidance"),
        ),
    }
    chosen = {
        name: (v, why)
        for name, (v, usual, why) in values.items()
        if v is not None and (v == usual) is ours
    }
    shown = []
    for name, (value, why) in chosen.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        shown.append(f"{name} {text}" + (f"  ({why})" if ours and why else ""))
    return shown


QUANTITIES = ("_bytes", "_seconds", "images_per_second", "num_steps", "cost")
"""How names end whose values are compared by their ratio; others, such as a rank, are chosen,
not measured.
"""
TIMES = ("step_seconds", "run_seconds")
"""Names of values that a plan may have predicted, as uncertain as it says."""


@dataclass(frozen=True)
class Difference:
    """One thing that both plans have and that is not the same; for quantities the second over
    the first, too.
    """

    name: str
    first: str | int | float | None
    second: str | int | float | None
    ratio: float | None = None
    first_uncertainty: float | None = None
    """Standard error of `first`, as a share of it, if it is a time that was predicted."""
    second_uncertainty: float | None = None


def differences(
    first: TrainingPlan, second: TrainingPlan, *, price_per_hour: float | None = None
) -> tuple[Difference, ...]:
    """What differs, in the order of a plan's report. Units are in the names."""
    ours, theirs = list(_facts(first, price_per_hour)), list(_facts(second, price_per_hour))
    doubts = [plan.frozen.expected.time_uncertainty for plan in (first, second)]
    return tuple(
        Difference(
            *(name, a, b),
            b / a if name.endswith(QUANTITIES) and a and b is not None else None,  # type: ignore[operator]
            *(doubts if name in TIMES else ()),
        )
        for (name, a), (_, b) in zip(ours, theirs, strict=True)
        if a != b
    )


def _facts(
    plan: TrainingPlan, price_per_hour: float | None
) -> Iterator[tuple[str, str | int | float | None]]:
    frozen, expected = plan.frozen, plan.frozen.expected
    yield "model", frozen.workload.model.name
    yield "device", frozen.hardware.device_name
    for name in type(frozen.workload).model_fields:
        if name not in ("model", "buckets"):
            yield f"workload.{name}", getattr(frozen.workload, name)
    largest = frozen.workload.largest_bucket
    yield "workload.largest_bucket", f"{largest.width_px}x{largest.height_px}x{largest.num_frames}"
    for name, value in frozen.settings:
        yield f"settings.{name}", value
    yield "evidence", expected.evidence
    yield "run_memory_bytes", expected.run_memory_bytes
    yield "step_memory_bytes", expected.peak_memory_bytes
    yield "step_seconds", expected.step_seconds
    yield "images_per_second", expected.images_per_second
    yield "num_steps", plan.job.num_steps
    yield "run_seconds", plan.job_seconds
    if price_per_hour is not None:
        yield "cost", plan.cost_at(price_per_hour)
    yield "search_seconds", frozen.search_seconds


def difference_lines(found: Sequence[Difference]) -> list[str]:
    """Aligned for people."""
    if not found:
        return ["the plans do not differ"]
    return [
        f"{_title(item.name):<24} "
        f"{_shown(item.name, item.first) + uncertainty_text(item.first_uncertainty):>20} -> "
        f"{_shown(item.name, item.second) + uncertainty_text(item.second_uncertainty):<20}"
        f"{'' if item.ratio is None else _times(item.ratio)}".rstrip()
        for item in found
    ]


def _times(ratio: float) -> str:
    return f" {ratio:.2f}x" if ratio >= 0.1 else f" {ratio:.2g}x"


def _title(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def _shown(name: str, value: str | int | float | None) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return memory_text(value)
    if name.endswith("_seconds") and isinstance(value, float):
        return seconds_text(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
