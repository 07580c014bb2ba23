"""Which records count for a machine and its work, and how much: match keys decide whether a record
counts, soft keys how much. A record is advice: `warm_start.py` says what a search does with it.

A distance is a weighted sum: a name or version that differs counts its weight once, a quantity its
weight per doubling. Weights are judgments of how much each shifts step time and memory; a local
trial has the last word either way.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from autotune.cost.calibration import PriorResiduals
from autotune.cost.predict import CostModel
from autotune.errors import AutotuneError
from autotune.knobs.attention import ATTENTION_BACKENDS, prefers_cudnn
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import KEY_NAMES, HardwareProfile
from autotune.plan.trial import Residual, TrialResult
from autotune.plan.typical import mean_text_tokens
from autotune.plan.workload import Workload
from autotune.share.record import (
    Machine,
    Record,
    architecture_folder,
    shareable_machine,
    workload_class,
)
from autotune.share.store import Store, shipped_store, user_store
from autotune.system.version import __version__

Value = str | float | None
Kind = Literal["exact", "upgraded", "near", "none"]
SAME_BUDGET = 0.98
"""Their budget as a share of ours from which their OOMs are evidence for us."""
MORE_MEMORY = 0.10
"""Share by which our budget exceeds theirs before other settings may win here."""
NOISY_RATE_TOLERANCE = 0.30
"""Relative difference of rates up to which two machines count as the same, if one was measured
beside other work: five probes of one such machine differed by up to 19%."""
MEMORY_BOUND = 0.8
"""Peak as a share of the budget from which memory has decided among settings."""


@dataclass(frozen=True)
class SoftKey:
    """One fact that shades a measurement."""

    name: str
    value_of: Callable[[Any], Value]
    weight: float
    tolerance: float = 0.0
    """Relative difference of a quantity up to which two count as the same."""
    software: bool = False
    """Whether an upgrade changes it."""
    is_rate: bool = False
    """Whether it is measured, so that other work on the machine changes it."""


class Difference(NamedTuple):
    """How two values of a soft key differ."""

    distance: float
    reason: str
    software: bool


def _rate(prefix: str) -> Callable[[Machine], Value]:
    """The fastest measured rate of a kind: shapes differ between versions of the probe."""
    return lambda machine: max(
        (rate.value for rate in machine.rates if rate.name.startswith(prefix)), default=None
    )


def _training_cores(machine: Machine) -> Value:
    """Cores count if the CPU trains."""
    return machine.logical_cores if machine.match_keys.get("device_kind") == "cpu" else None


def _version(name: str, weight: float) -> SoftKey:
    return SoftKey(name, lambda machine: getattr(machine.versions, name), weight, software=True)


MACHINE_KEYS: tuple[SoftKey, ...] = (
    SoftKey("device", lambda machine: machine.device_name, 1.0),
    SoftKey("cores", _training_cores, 1.0),
    SoftKey("memory", lambda machine: machine.total_memory_bytes, 1.0, 0.03),
    SoftKey("memory bandwidth", _rate("memory.bandwidth"), 2.0, 0.10, is_rate=True),
    SoftKey("bf16 matmul rate", _rate("matmul.bf16."), 2.0, 0.10, is_rate=True),
    SoftKey("fp16 matmul rate", _rate("matmul.fp16."), 2.0, 0.10, is_rate=True),
    SoftKey("power limit", lambda machine: machine.power_limit_watts, 1.0, 0.03),
    _version("driver", 0.1),
    _version("cudnn", 0.1),
    _version("triton", 0.05),
    _version("diffusers", 0.1),
    _version("transformers", 0.05),
    _version("peft", 0.1),
)

WORKLOAD_KEYS: tuple[SoftKey, ...] = (
    SoftKey(
        "pixels", lambda work: work.largest_bucket.width_px * work.largest_bucket.height_px, 2.0
    ),
    SoftKey("frames", lambda work: work.largest_bucket.num_frames, 2.0),
    SoftKey("longest caption", lambda work: work.max_text_tokens, 0.5, 0.25),
    SoftKey("mean caption length", mean_text_tokens, 0.5, 0.25),
    SoftKey("caption padding", lambda work: work.text_padding, 0.5),
    SoftKey("rank", lambda work: work.rank, 0.5),
    SoftKey("adapted layers", lambda work: work.targets, 1.0),
    SoftKey("adapter dropout", lambda work: str(work.lora_dropout > 0), 0.5),
    SoftKey("adapted blocks", lambda work: work.adapted_blocks, 1.0),
    SoftKey("kind of adapter", lambda work: str(work.adapter == "dora"), 2.0),
    SoftKey("optimizer", lambda work: work.optimizer.name, 0.5),
    SoftKey("effective batch size", lambda work: work.effective_batch_size, 0.5),
    SoftKey("control images", lambda work: str(work.num_control_images), 1.0),
    SoftKey("quality floor", lambda work: work.quality, 0.05),
    SoftKey("objective", lambda work: work.objective, 0.05),
)


@dataclass(frozen=True)
class Match:
    """How a record stands to a machine and its work."""

    kind: Kind
    """`exact`: nothing differs that matters, one trial reproduces it; `upgraded`: only software
    differs, and what it changed is measured again; `near`: a prior; `none`: it does not count."""
    distance: float
    """0 if exact, infinite if it does not count."""
    reasons: tuple[str, ...]
    """What differs, one line each; the match keys alone if one of them does."""


def compare(
    record: Record, hardware: HardwareProfile, workload: Workload, budget_bytes: int | None = None
) -> Match:
    """Compare a record with this machine and this work."""
    work, machine = (
        compare_workload(record, workload),
        compare_machine(record, hardware, budget_bytes),
    )
    if "none" in (work.kind, machine.kind):
        return work if work.kind == "none" else machine
    kind = machine.kind if work.kind == "exact" and record.conclusive else "near"
    limited = () if record.conclusive else ("search: cut short there",)
    return Match(
        kind, machine.distance + work.distance, (*machine.reasons, *work.reasons, *limited)
    )


def compare_workload(record: Record, workload: Workload) -> Match:
    """Compare the work alone."""
    ours, theirs = workload.model, record.workload.model
    if ours.architecture != theirs.architecture:
        return Match("none", math.inf, (f"architecture: {theirs.name} there, {ours.name} here",))
    found = tuple(_differences(WORKLOAD_KEYS, record.workload, workload))
    reasons = tuple(difference.reason for difference in found)
    if not reasons and workload_class(record.workload) != workload_class(workload):
        reasons = ("class of work",)  # the same largest bucket under another resolution
    return Match(
        "near" if reasons else "exact", sum(difference.distance for difference in found), reasons
    )


def compare_machine(
    record: Record, hardware: HardwareProfile, budget_bytes: int | None = None
) -> Match:
    """Compare a record with this machine alone, whatever the work."""
    machine = shareable_machine(hardware)
    ours, theirs = machine.match_keys, record.machine.match_keys
    decisive = tuple(
        (
            f"{KEY_NAMES.get(key, key)}: {theirs.get(key) or 'none'} there, "
            f"{ours.get(key) or 'none'} here"
        )
        for key in sorted({*theirs, *ours})
        if theirs.get(key) != ours.get(key)
    )
    if decisive:
        return Match("none", math.inf, decisive)
    unusable = unusable_trials(record, hardware)
    libraries = tuple(sorted(set(unusable.values())))
    if len(unusable) == len(record.trials):
        return Match("none", math.inf, libraries)
    found = (
        *_differences(
            MACHINE_KEYS, record.machine, machine, noisy=record.machine.noisy or machine.noisy
        ),
        *_more_memory(record, _budget(hardware, budget_bytes)),
    )
    reasons = (*libraries, *(difference.reason for difference in found))
    only_software = all(difference.software for difference in found)
    kind: Kind = ("upgraded" if reasons else "exact") if only_software else "near"
    return Match(kind, sum(difference.distance for difference in found), reasons)


def _budget(hardware: HardwareProfile, budget_bytes: int | None) -> int:
    return hardware.device.budget_bytes if budget_bytes is None else budget_bytes


def _more_memory(record: Record, ours: int) -> Iterator[Difference]:
    """If memory was short there and is not so short here, something else may win."""
    theirs = record.machine.budget_bytes
    was_short = any(
        trial.outcome in ("oom", "spill") or (trial.peak_memory_bytes or 0) > MEMORY_BOUND * theirs
        for trial in record.trials
    )
    if was_short and ours > (1 + MORE_MEMORY) * theirs:
        yield Difference(
            math.log2(ours / max(theirs, 1)),
            f"memory budget: {theirs / ours:.2f} times ours",
            False,
        )


def unusable_trials(record: Record, hardware: HardwareProfile) -> dict[int, str]:
    """Position of each trial that ran on a library which differs here, and why it does not
    count."""
    ours, theirs = shareable_machine(hardware).versions, record.machine.versions
    capability = hardware.device.compute_capability
    native_is_cudnn = any(prefers_cudnn(capability, versions.cudnn) for versions in (ours, theirs))
    found = {}
    for index, trial in enumerate(record.trials):
        for library in _libraries(trial.candidate, native_is_cudnn):
            here, there = getattr(ours, library), getattr(theirs, library)
            if here != there:
                found[index] = (
                    f"trials on {library}: {there or 'none'} there, {here or 'none'} here"
                )
    return found


def _libraries(candidate: Candidate, native_is_cudnn: bool) -> Iterator[str]:
    """Fields of `Versions` that decide how the candidate runs, beside those that decide for
    every trial."""
    attention = ATTENTION_BACKENDS.get(candidate.attention)
    for entry in (attention, WEIGHT_FORMATS.get(candidate.quantization)):
        if entry is not None and entry.needs.library is not None:
            yield entry.needs.library
    if attention and (
        attention.kernel == "cudnn" or (attention.kernel == "fused" and native_is_cudnn)
    ):
        yield "cudnn"


def usable_trials(
    record: Record, hardware: HardwareProfile, budget_bytes: int | None = None
) -> tuple[TrialResult, ...]:
    """The trials whose libraries are the same here, less those that ran out of a smaller budget
    than ours."""
    unusable = unusable_trials(record, hardware)
    smaller = record.machine.budget_bytes < SAME_BUDGET * _budget(hardware, budget_bytes)
    return tuple(
        trial
        for index, trial in enumerate(record.trials)
        if index not in unusable and not (smaller and trial.outcome == "oom")
    )


def _differences(
    keys: tuple[SoftKey, ...], there: Any, here: Any, *, noisy: bool = False
) -> Iterator[Difference]:
    """What differs between two machines or workloads. What one side does not know is no
    difference."""
    for key in keys:
        theirs, ours = key.value_of(there), key.value_of(here)
        if theirs is None or ours is None or theirs == ours:
            continue
        if isinstance(theirs, str) or isinstance(ours, str):
            yield Difference(key.weight, f"{key.name}: {theirs} there, {ours} here", key.software)
        elif theirs <= 0 or ours <= 0:
            yield Difference(key.weight, f"{key.name}: not a quantity", key.software)
        elif abs(theirs - ours) > (
            NOISY_RATE_TOLERANCE if noisy and key.is_rate else key.tolerance
        ) * min(theirs, ours):
            distance = key.weight * abs(math.log2(theirs / ours))
            yield Difference(distance, f"{key.name}: {theirs / ours:.2f} times ours", key.software)


MAX_CONSIDERED = 500
"""Records opened for one search."""
DECAY_DISTANCE = 10.0
"""Distance at which a record weighs 1/e. It corrects predictions, not times, so it carries over
between machines whose rates differ."""
MATCH_ORDER = ("exact", "upgraded", "near")
"""Kinds of matches that count, the best first."""


@dataclass(frozen=True)
class MatchedRecord:
    """A record that counts here."""

    name: str
    record: Record
    match: Match
    trials: tuple[TrialResult, ...]
    """Those that count: without the ones on a library of another version."""

    @property
    def weight(self) -> float:
        """Weight of what it taught the cost model, in (0, 1]."""
        return math.exp(-self.match.distance / DECAY_DISTANCE)


@dataclass(frozen=True)
class StoreMatches:
    """What the stores have for a machine and its work."""

    records: tuple[MatchedRecord, ...]
    """Exact ones first, then those before an upgrade, then by distance; newer before older, of
    one day the fastest."""
    stale: tuple[str, ...]
    """Records of this very device that no longer count, or only in part, after a change here:
    one line each."""
    refused: tuple[str, ...]
    """Records that cannot be true or cannot be read: one line each."""


def find_matches(
    hardware: HardwareProfile,
    workload: Workload,
    budget_bytes: int | None = None,
    stores: Sequence[Store] | None = None,
) -> StoreMatches:
    """Find the records that count for `workload` on this machine, in `stores`.

    By default those are the user's own store and the shipped records. With measured rates in
    `hardware`, distances are more accurate. `budget_bytes` is what a run may use of the device; by
    default what the device leaves.
    """
    found: dict[str, MatchedRecord] = {}
    stale: dict[str, str] = {}
    refused: dict[str, str] = {}
    for store in (user_store(), shipped_store()) if stores is None else stores:
        try:
            keys = list(store.sizes(architecture_folder(workload)))[:MAX_CONSIDERED]
            files = list(store.read(keys))
        except AutotuneError as error:  # a search does without a store that does not answer
            refused[store.address] = error.message
            continue
        for file in files:
            if file.record is None:
                refused[file.name] = file.problem
                continue
            record, name = file.record, file.name
            match = compare(record, hardware, workload, budget_bytes)
            if match.kind != "none":
                trials = usable_trials(record, hardware, budget_bytes)
                found[name] = MatchedRecord(name, record, match, trials)
            if match.kind != "exact" and _is_of_this_device(record, hardware, workload):
                verdicts = {
                    "none": "no longer counts",
                    "upgraded": "is from before an upgrade, and verified first",
                }
                verdict = verdicts.get(match.kind, "counts as a prior only")
                stale[name] = f"{name[:12]} {verdict}: {'; '.join(match.reasons)}"
    ordered = sorted(found.values(), key=_rank)
    if ordered and ordered[0].match.kind == "exact":
        stale = {}  # measured again since
    return StoreMatches(tuple(ordered), tuple(stale.values()), tuple(refused.values()))


def _is_of_this_device(record: Record, hardware: HardwareProfile, workload: Workload) -> bool:
    """Whether it reads as this very device's record of this very work, before something was
    upgraded."""
    machine, device = record.machine, hardware.device
    same_device = (
        machine.device_name == device.name and machine.match_keys.get("device_kind") == device.kind
    )
    return (
        same_device
        and machine.total_memory_bytes == device.total_memory_bytes
        and is_same_work(record, workload)
    )


def is_same_work(record: Record, workload: Workload) -> bool:
    """Whether nothing differs that times or memory depend on: quality floor and objective only
    choose among trials."""
    ours = workload.changed(quality=record.workload.quality, objective=record.workload.objective)
    return compare_workload(record, ours).kind == "exact"


def _rank(item: MatchedRecord) -> tuple[object, ...]:
    age = -item.record.credible_day.toordinal()
    step_seconds = item.record.expected.step_seconds
    return MATCH_ORDER.index(item.match.kind), item.match.distance, age, step_seconds, item.name


MAX_SOURCES = 3
"""Records of similar machines that a search stands on."""
MAX_FIRST_CANDIDATES = 2
"""Settings that won on similar machines and are tried first."""
MAX_RESIDUALS = 32
"""Trials of a record that correct predictions: a search makes far fewer, and each costs time in
every prediction."""
MEMORY_TOLERANCE = 0.03
TIME_TOLERANCE = 0.10
"""Relative difference up to which a local trial reproduces a measurement."""
NOISY_TIME_TOLERANCE = 0.30
"""The same for time, if one of the two machines was measured beside other work."""
CREDIBLE_TIME_RATIO = (1 / 3, 10.0)
CREDIBLE_MEMORY_RATIO = (1 / 1.5, 3.0)
"""Measured over predicted, lowest and highest, of a record that is tried. What is slow or large
does no harm, and true trials on a busy CPU have been 4 times as slow as predicted."""
MAX_LOG_TIME_ERROR = math.log(3.0)
"""Logarithm of the factor between the step time that a record leads to expect and a local
trial's, above which the record is dropped."""
BUDGET_MARGIN = 1.1
"""Share of the budget that settings that ran elsewhere may be predicted to take, and still be
tried first: predictions are that far off at most in 95 of 100 cases, and trials have a cap."""


@dataclass(frozen=True)
class WarmStartSource:
    """A record that a search stands on."""

    name: str
    trials: tuple[TrialResult, ...]
    """Those that count, of settings that are in the local search space."""
    to_reproduce: tuple[TrialResult, ...]
    """Those that local trials must reproduce to end the search, the winner's first; empty if
    another machine's."""
    prior_residuals: PriorResiduals
    """What its trials taught the cost model there."""
    time_tolerance: float = TIME_TOLERANCE

    def find_mismatch(
        self, recorded: TrialResult, local: Mapping[Candidate, TrialResult]
    ) -> str | None:
        """Why the local trial of the same settings does not reproduce a recorded one; None if it
        does."""
        return find_mismatch(recorded, local[recorded.candidate], self.time_tolerance)


@dataclass(frozen=True)
class WarmStart:
    """What the records contribute to one search."""

    sources: tuple[WarmStartSource, ...]
    """One that is exact or from before an upgrade, else the nearest few."""
    first_candidates: tuple[Candidate, ...]
    """Candidates to try before all others."""
    cost: CostModel

    def priors(self, results: Sequence[TrialResult]) -> tuple[PriorResiduals, ...]:
        """What the records taught the cost model, less those that `results` contradict; the most
        similar first."""
        return tuple(
            source.prior_residuals
            for source in self.sources
            if source.prior_residuals.residuals and not self._find_contradiction(source, results)
        )

    def contradictions(self, results: Sequence[TrialResult]) -> tuple[str, ...]:
        """Records that `results` contradict, one line each."""
        found = ((source, self._find_contradiction(source, results)) for source in self.sources)
        return tuple(f"{source.name[:12]} {reason}" for source, reason in found if reason)

    @property
    def records(self) -> tuple[str, ...]:
        """Names of the records, contradicted ones too: without them the search would have gone
        otherwise."""
        return tuple(source.name for source in self.sources)

    def _find_contradiction(
        self, source: WarmStartSource, results: Sequence[TrialResult]
    ) -> str | None:
        local = {result.candidate: result for result in results}
        for recorded in source.to_reproduce:
            if recorded.candidate in local and (mismatch := source.find_mismatch(recorded, local)):
                return f"does not hold here: {mismatch}"
        for candidate, prior in source.prior_residuals.residuals:
            residual = self.cost.residual(local[candidate]) if candidate in local else None
            if residual and abs(residual.time - prior.time) > MAX_LOG_TIME_ERROR:
                ratio = math.exp(residual.time - prior.time)
                return (
                    f"misleads: {candidate.label()} takes {ratio:.2g} times as long as it "
                    "leads to "
                    "expect"
                )
        return None

    def is_reproduced(self, results: Sequence[TrialResult]) -> bool:
        """Whether `results` reproduce all of a record that must be, so that nothing else need be
        tried."""
        return self._reproduced_source(results) is not None

    def _reproduced_source(self, results: Sequence[TrialResult]) -> WarmStartSource | None:
        local = {result.candidate: result for result in results}
        for source in self.sources:
            needed = source.to_reproduce[:1] + tuple(
                trial
                for trial in source.to_reproduce[1:]
                if trial.candidate in self.first_candidates
            )
            if needed and all(
                t.candidate in local and not source.find_mismatch(t, local) for t in needed
            ):
                return source
        return None

    def evidence(self, results: Sequence[TrialResult]) -> tuple[TrialResult, ...]:
        """Trials of a record that was reproduced explain, too, why other settings lost."""
        source = self._reproduced_source(results)
        local = {result.candidate for result in results}
        return (
            tuple(trial for trial in source.trials if trial.candidate not in local)
            if source
            else ()
        )


NO_WARM_START: WarmStart = WarmStart((), (), None)  # type: ignore[arg-type]


def build_warm_start(
    matches: StoreMatches,
    choices: Mapping[str, Sequence[Choice]],
    budget_bytes: int,
    workload: Workload,
    cost: CostModel,
) -> tuple[StoreMatches, WarmStart]:
    """Choose the records that a search among `choices`, the values that each knob may have, stands
    on.

    Returns:
        `matches` with the chosen records alone, those that are not credible among the refused; and
        the warm start.
    """
    used: list[MatchedRecord] = []
    sources: list[WarmStartSource] = []
    refused = list(matches.refused)
    items = (_demote_restricted(item, choices) for item in matches.records)
    for item in sorted(items, key=lambda item: MATCH_ORDER.index(item.match.kind)):
        if len(sources) == MAX_SOURCES or any(source.to_reproduce for source in sources):
            break
        if not _is_admitted(item.record.settings, choices):
            continue
        if reason := next(_find_implausible(item.record, choices, workload, cost), None):
            refused.append(f"{item.name[:12]} is not credible: {reason}")
            continue
        used.append(item)
        local = tuple(trial for trial in item.trials if _is_admitted(trial.candidate, choices))
        residuals = PriorResiduals(tuple(islice(_residuals(item), MAX_RESIDUALS)), item.weight)
        noisy = item.record.machine.noisy or cost.hardware.noisy
        tolerance = NOISY_TIME_TOLERANCE if noisy else TIME_TOLERANCE
        sources.append(
            WarmStartSource(item.name, local, _trials_to_reproduce(item), residuals, tolerance)
        )
    proposed = [trial.candidate for source in sources for trial in source.to_reproduce]
    proposed = proposed or [item.record.settings for item in used]
    limit = BUDGET_MARGIN * budget_bytes
    fitting = [
        candidate
        for candidate in dict.fromkeys(proposed)
        if _is_admitted(candidate, choices)
        and cost.predict_uncalibrated(candidate).run_memory_bytes <= limit
    ]
    warm_start = WarmStart(tuple(sources), tuple(fitting[:MAX_FIRST_CANDIDATES]), cost)
    return replace(matches, records=tuple(used), refused=tuple(refused)), warm_start


def _is_admitted(candidate: Candidate, choices: Mapping[str, Sequence[Choice]]) -> bool:
    return all(getattr(candidate, name) in values for name, values in choices.items())


def _demote_restricted(
    item: MatchedRecord, choices: Mapping[str, Sequence[Choice]]
) -> MatchedRecord:
    """A match is a prior only if knobs were pinned, or had values excluded, there that are free
    here."""
    free = [name for name in item.record.narrowed if len(choices.get(name, ())) > 1]
    if not free:
        return item
    reason = f"search: restricted there in {', '.join(free)}"
    return replace(
        item, match=replace(item.match, kind="near", reasons=(*item.match.reasons, reason))
    )


def _trials_to_reproduce(item: MatchedRecord) -> tuple[TrialResult, ...]:
    """The winner's trial; and if a library was upgraded, the fastest that ran on it, since it
    may be faster now."""
    if item.match.kind == "near":
        return ()
    ran = [trial for trial in item.record.trials if trial.outcome == "ok"]
    winner = next(trial for trial in ran if trial.candidate == item.record.settings)
    changed = [trial for trial in ran if trial not in item.trials]
    if winner in changed:
        return (winner,)
    fastest = min(changed, key=lambda trial: trial.median_step_seconds or math.inf, default=winner)
    return tuple(dict.fromkeys((winner, fastest)))


def _residuals(item: MatchedRecord) -> Iterator[tuple[Candidate, Residual]]:
    """Residuals of the trials that count, if they were compared with the cost model of this
    version."""
    record = item.record
    if record.autotune_version == __version__:
        for trial, residual in zip(record.trials, record.calibration, strict=False):
            if residual and trial in item.trials:
                yield trial.candidate, residual


def _find_implausible(
    record: Record, choices: Mapping[str, Sequence[Choice]], workload: Workload, cost: CostModel
) -> Iterator[str]:
    """Trials that the cost model of the record's own machine contradicts. Other work is left to
    local trials.

    Only settings of the local space are predicted: of those that it lacks nothing but a name may be
    known here.
    """
    if not is_same_work(record, workload):
        return
    rates = record.machine.rates or cost.hardware.rates
    there = cost.for_hardware(cost.hardware.changed(rates=rates))
    for number, trial in enumerate(record.trials, start=1):
        residual = there.residual(trial) if _is_admitted(trial.candidate, choices) else None
        if residual is None:
            continue
        time, memory = math.exp(residual.time), math.exp(residual.memory)
        lowest, highest = CREDIBLE_TIME_RATIO
        if (
            not record.machine.noisy and not lowest <= time <= highest
        ):  # noisy rates contradict nothing
            yield f"trial {number} took {time:.2g} times the time that is predicted for its machine"
        lowest, highest = CREDIBLE_MEMORY_RATIO
        if not lowest <= memory <= highest:
            yield f"trial {number} took {memory:.2g} times the memory that is predicted"


def find_mismatch(
    recorded: TrialResult, trial: TrialResult, time_tolerance: float = TIME_TOLERANCE
) -> str | None:
    """Why a local trial of the same settings does not reproduce a recorded one; None if it does."""
    seconds, peak = trial.median_step_seconds, trial.peak_memory_bytes
    if trial.outcome != "ok" or not seconds or not peak:
        return f"it ended as {trial.outcome}"
    time, memory = (
        seconds / (recorded.median_step_seconds or math.inf),
        peak / (recorded.peak_memory_bytes or math.inf),
    )
    if abs(memory - 1) > MEMORY_TOLERANCE:
        return f"it takes {memory:.2f} times the recorded memory"
    if abs(time - 1) > time_tolerance:
        return f"it takes {time:.2f} times the recorded time"
    return None
