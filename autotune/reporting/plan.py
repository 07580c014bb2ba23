"""A plan and its trials as text for a terminal of 80 columns."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.knobs import KNOBS, TITLES, describe_caching
from autotune.reporting.text import (
    capped,
    count_text,
    energy_text,
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
        *_energy_line(plan),
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


def _energy_line(plan: TrainingPlan) -> list[str]:
    """What an image and the steps of the job take, by what trials measured; nothing if the
    device did not tell.
    """
    joules, kwh = plan.frozen.expected.joules_per_image, plan.job_kwh
    if joules is None or kwh is None:
        return []
    gpus = "GPUs" if plan.frozen.hardware.num_processes > 1 else "GPU"
    whole = (
        "" if plan.job.num_train_epochs is not None else f", {kwh:.3g} kWh for the steps of the job"
    )
    return [f"energy         {energy_text(joules)} an image{whole}, by the {gpus} alone"]


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


def variant_lines(plans: Sequence[TrainingPlan], file: Path) -> list[str]:
    """What differs between the variants of several machines, and the command that trains them."""
    lines = []
    for plan in plans:
        expected = plan.frozen.expected
        lines += [
            plan.frozen.hardware.device_name,
            *wrapped(f"  {plan.frozen.settings.label()}", 4),
            f"  {seconds_text(expected.step_seconds)}{uncertainty_text(expected.time_uncertainty)} "
            "per step, "
            f"run memory {memory_text(expected.run_memory_bytes)}",
            *wrapped(f"  {' '.join(job_line(plan).split())}", 4),
        ]
    return [
        *lines,
        *_written_lines(file, "train it on any of them with:", _train_words(plans[0], file)),
    ]


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
        if trial.joules_per_image is not None:
            lines.append(f"      {energy_text(trial.joules_per_image)} an image")
        if trial.message:
            lines += wrapped(f"      {trial.message}")
    if plan.frozen.fallbacks:
        lines.append("")
        lines.append("if memory is shorter than planned, in this order")
        lines += [
            line for one in plan.frozen.fallbacks for line in wrapped(f"    {one.label()}", 4)
        ]
    return lines
