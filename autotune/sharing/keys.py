"""How far a record is from a machine and its work: hard keys decide whether it counts, soft ones how much.

A distance is a weighted sum: a name or version that differs counts its weight once, a quantity its weight per doubling.
Weights are judgments of how much each shifts step time and memory; a local trial has the last word either way.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from autotune.backends import ATTENTION_BACKENDS, WEIGHT_FORMATS, prefers_cudnn
from autotune.schema import Candidate, HardwareProfile, TrialResult, Workload, mean_text_tokens
from autotune.sharing.record import Machine, Record, class_of, machine_of
from autotune.training import KEY_NAMES

Value = str | float | None
Kind = Literal["exact", "upgraded", "near", "none"]
SAME_BUDGET = 0.98
"""Share of our budget from which running out of theirs says something about ours."""
MORE_MEMORY = 0.10
"""Share by which our budget exceeds theirs before other settings may win here."""
CROWDED = 0.8
"""Share of a budget from which memory decided among settings."""


@dataclass(frozen=True)
class SoftKey:
    """One fact that shades a measurement."""

    name: str
    of: Callable[[Any], Value]
    weight: float
    tolerance: float = 0.0
    """Relative difference of a quantity up to which two count as the same."""
    software: bool = False
    """Whether an upgrade changes it."""


def _rate(prefix: str) -> Callable[[Machine], Value]:
    """The fastest measured rate of a kind: shapes differ between versions of the probe."""

    def fastest(machine: Machine) -> Value:
        return max((rate.value for rate in machine.rates if rate.name.startswith(prefix)), default=None)

    return fastest


def _training_cores(machine: Machine) -> Value:
    """Cores count where they train."""
    return machine.logical_cores if machine.match_keys.get("device_kind") == "cpu" else None


def _version(name: str, weight: float) -> SoftKey:
    return SoftKey(name, lambda machine: getattr(machine.versions, name), weight, software=True)


MACHINE_KEYS: tuple[SoftKey, ...] = (
    SoftKey("device", lambda machine: machine.device_name, 1.0),
    SoftKey("cores", _training_cores, 1.0),
    SoftKey("memory", lambda machine: machine.total_memory_bytes, 1.0, 0.03),
    SoftKey("memory bandwidth", _rate("memory.bandwidth"), 2.0, 0.10),
    SoftKey("bf16 matmul rate", _rate("matmul.bf16."), 2.0, 0.10),
    SoftKey("power limit", lambda machine: machine.power_limit_watts, 1.0, 0.03),
    _version("driver", 0.1),
    _version("cudnn", 0.1),
    _version("triton", 0.05),
    _version("diffusers", 0.1),
    _version("transformers", 0.05),
    _version("peft", 0.1),
)

WORK_KEYS: tuple[SoftKey, ...] = (
    SoftKey("pixels", lambda work: work.largest_bucket.width_px * work.largest_bucket.height_px, 2.0),
    SoftKey("frames", lambda work: work.largest_bucket.num_frames, 2.0),
    SoftKey("longest caption", lambda work: work.max_text_tokens, 0.5, 0.25),
    SoftKey("usual caption tokens", mean_text_tokens, 0.5, 0.25),
    SoftKey("caption padding", lambda work: work.text_padding, 0.5),
    SoftKey("rank", lambda work: work.rank, 0.5),
    SoftKey("adapted layers", lambda work: work.targets, 1.0),
    SoftKey("adapter dropout", lambda work: str(work.lora_dropout > 0), 0.5),
    SoftKey("effective batch size", lambda work: work.effective_batch_size, 0.5),
    SoftKey("control images", lambda work: str(work.num_control_images), 1.0),
    SoftKey("quality floor", lambda work: work.quality, 0.05),
    SoftKey("objective", lambda work: work.objective, 0.05),
)


@dataclass(frozen=True)
class Match:
    """How a record stands to a machine and its work."""

    kind: Kind
    """`exact`: nothing differs that matters, one trial verifies it; `upgraded`: only software does, what it changed is
    measured again; `near`: a prior; `none`: it does not count."""
    distance: float
    """0 when exact, infinite when it does not count."""
    reasons: tuple[str, ...]
    """What differs, one line each; the hard keys alone where one of them does."""


def compare(record: Record, hardware: HardwareProfile, workload: Workload) -> Match:
    """Compare a record with this machine and this work."""
    work, machine = compare_work(record, workload), compare_machine(record, hardware)
    if "none" in (work.kind, machine.kind):
        return work if work.kind == "none" else machine
    kind = machine.kind if work.kind == "exact" and record.conclusive else "near"
    limited = () if record.conclusive else ("search: cut short there",)
    return Match(kind, machine.distance + work.distance, (*machine.reasons, *work.reasons, *limited))


def compare_work(record: Record, workload: Workload) -> Match:
    """Compare the work alone."""
    here, there = workload.model, record.workload.model
    if here.architecture != there.architecture:
        return Match("none", math.inf, (f"architecture: {there.name} there, {here.name} here",))
    found = tuple(_differences(WORK_KEYS, record.workload, workload))
    reasons = tuple(reason for _, reason, _ in found)
    if not reasons and class_of(record.workload) != class_of(workload):
        reasons = ("class of work",)  # the same largest bucket under another resolution
    return Match("near" if reasons else "exact", sum(size for size, _, _ in found), reasons)


def compare_machine(record: Record, hardware: HardwareProfile) -> Match:
    """Compare a record with this machine alone, whatever the work."""
    here, there = machine_of(hardware), record.machine
    ours, theirs = here.match_keys, there.match_keys
    hard = tuple(
        f"{KEY_NAMES.get(key, key)}: {theirs.get(key) or 'none'} there, {ours.get(key) or 'none'} here"
        for key in sorted({*theirs, *ours})
        if theirs.get(key) != ours.get(key)
    )
    if hard:
        return Match("none", math.inf, hard)
    unusable = unusable_trials(record, hardware)
    if len(unusable) == len(record.trials):
        return Match("none", math.inf, tuple(sorted(set(unusable.values()))))
    found = (*_differences(MACHINE_KEYS, there, here), *_more_memory(record, hardware))
    reasons = (*sorted(set(unusable.values())), *(reason for _, reason, _ in found))
    kind: Kind = "near" if any(not software for _, _, software in found) else "upgraded" if reasons else "exact"
    return Match(kind, sum(size for size, _, _ in found), reasons)


def _more_memory(record: Record, hardware: HardwareProfile) -> Iterator[tuple[float, str, bool]]:
    """Where memory was short there and is not so short here, something else may win."""
    theirs, ours = record.machine.budget_bytes, hardware.device.budget_bytes
    wall = any(t.outcome in ("oom", "spill") or (t.peak_memory_bytes or 0) > CROWDED * theirs for t in record.trials)
    if wall and ours > (1 + MORE_MEMORY) * theirs:
        yield math.log2(ours / max(theirs, 1)), f"memory to take: {theirs / ours:.2f} times ours", False


def unusable_trials(record: Record, hardware: HardwareProfile) -> dict[int, str]:
    """Position of each trial that ran on a library which differs here, and why it does not count."""
    here, there = machine_of(hardware).versions, record.machine.versions
    native_is_cudnn = any(prefers_cudnn(hardware.model_copy(update={"versions": known})) for known in (here, there))
    found = {}
    for index, trial in enumerate(record.trials):
        for name in _libraries(trial.candidate, native_is_cudnn):
            theirs, ours = getattr(there, name), getattr(here, name)
            if theirs != ours:
                found[index] = f"trials on {name}: {theirs or 'none'} there, {ours or 'none'} here"
    return found


def _libraries(candidate: Candidate, native_is_cudnn: bool) -> Iterator[str]:
    """Fields of `Versions` that decide how the candidate runs, beside those that decide for every trial."""
    attention = ATTENTION_BACKENDS.get(candidate.attention)
    for entry in (attention, WEIGHT_FORMATS.get(candidate.quantization)):
        if entry is not None and entry.needs.library is not None:
            yield entry.needs.library
    if attention and (attention.kernel == "cudnn" or (attention.kernel == "fused" and native_is_cudnn)):
        yield "cudnn"


def usable_trials(record: Record, hardware: HardwareProfile) -> tuple[TrialResult, ...]:
    """The trials whose libraries are the same here, less those that ran out of a smaller budget than ours."""
    unusable = unusable_trials(record, hardware)
    smaller = record.machine.budget_bytes < SAME_BUDGET * hardware.device.budget_bytes
    return tuple(
        trial
        for index, trial in enumerate(record.trials)
        if index not in unusable and not (smaller and trial.outcome == "oom")
    )


def _differences(keys: tuple[SoftKey, ...], there: Any, here: Any) -> Iterator[tuple[float, str, bool]]:
    """Weighted size and wording of what differs, and whether it is software. What one side does not know is not."""
    for key in keys:
        theirs, ours = key.of(there), key.of(here)
        if theirs is None or ours is None or theirs == ours:
            continue
        if isinstance(theirs, str) or isinstance(ours, str):
            yield key.weight, f"{key.name}: {theirs} there, {ours} here", key.software
        elif theirs <= 0 or ours <= 0:
            yield key.weight, f"{key.name}: not a quantity", key.software
        elif abs(theirs - ours) > key.tolerance * min(theirs, ours):
            yield (
                key.weight * abs(math.log2(theirs / ours)),
                f"{key.name}: {theirs / ours:.2f} times ours",
                key.software,
            )
