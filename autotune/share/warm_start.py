"""Choice of the records that count for a machine and its work, and of their use in a search.

A record only proposes. Its settings are tried first if they are predicted to fit; what it taught
the cost model is trusted as far as its machine is similar; its measurements hold once a local trial
has reproduced them. A wrong record can cost trials, and nothing else: it is named and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from autotune.cost.calibration import PriorResiduals
from autotune.errors import AutotuneError
from autotune.knobs.attention import ATTENTION_BACKENDS, prefers_cudnn
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.plan.candidate import Candidate, Choice, TrialResult
from autotune.plan.hardware import KEY_NAMES
from autotune.plan.workload import Workload, mean_text_tokens
from autotune.share.store import Machine, Record, Store, record_folder, user_store, workload_class
from autotune.system.version import __version__

if TYPE_CHECKING:
    from autotune.cost.predict import CostModel

SAME_BUDGET = 0.98  # their budget as a share of ours from which their OOMs are evidence for us
MORE_MEMORY = 0.10  # by which our budget exceeds theirs before other settings may win here
MEMORY_BOUND = 0.8  # peak as a share of the budget from which memory has decided among settings
RATE_TOLERANCE, NOISY_RATE_TOLERANCE = 0.10, 0.30
"""Relative difference of equal machines' rates; during other work, probes differed by up to 19%."""
MAX_CONSIDERED = 500  # records opened for one search
MAX_SOURCES = 3  # records of similar machines that a search stands on
MAX_FIRST_CANDIDATES = 2  # settings that won on similar machines and are tried first
MAX_RESIDUALS = 32  # of a record: a search makes far fewer trials, and each slows every prediction
DECAY_DISTANCE = 10.0  # at which a record weighs 1/e: predictions are corrected, not times
MEMORY_TOLERANCE = 0.03  # up to which a local trial reproduces a measurement, relative
TIME_TOLERANCE, NOISY_TIME_TOLERANCE = 0.10, 0.30
MAX_LOG_RESIDUAL = math.log(10.0)  # true trials on a busy CPU were 4 times as slow as predicted
MAX_SURPRISE = 2.0  # by which trials here may be less likely with a record than without (log)
BUDGET_MARGIN = 1.1
"""Share of the budget within which settings that ran elsewhere are tried first: 95 of 100
predictions are no farther off, and trials have a cap."""


class Match(NamedTuple):
    """Relation of a record to a machine and its work."""

    kind: Literal["exact", "near", "none"]
    """`exact`: one trial reproduces it; `near`: a prior; `none`: it does not count."""
    distance: float
    """Sum of weights, one for each name that differs and each doubling; infinite for `none`."""
    reasons: tuple[str, ...]  # differences, one line each; the match keys alone if one of them does


@dataclass(frozen=True)
class MatchedRecord:
    """A record that counts here."""

    name: str
    record: Record
    match: Match
    trials: tuple[TrialResult, ...]  # without those on a library of another version

    @cached_property
    def winner(self) -> TrialResult | None:
        """The trial that a local one must reproduce to end the search, if the match is exact."""
        if self.match.kind != "exact":
            return None
        ran = (trial for trial in self.trials if trial.outcome == "ok")
        return next((trial for trial in ran if trial.candidate == self.record.settings), None)

    @cached_property
    def prior_residuals(self) -> PriorResiduals:
        """Return what its trials taught the cost model of this version, if credible."""
        is_ours = self.record.autotune_version == __version__
        residuals = self.record.calibration if is_ours else ()
        credible = (
            (trial.candidate, residual)
            for trial, residual in zip(self.record.trials, residuals, strict=False)
            if residual
            and trial in self.trials
            and max(abs(residual.time), abs(residual.memory)) <= MAX_LOG_RESIDUAL
        )
        weight = math.exp(-self.match.distance / DECAY_DISTANCE)
        return PriorResiduals(tuple(islice(credible, MAX_RESIDUALS)), weight)


@dataclass(frozen=True)
class StoreMatches:
    """Records that a store has for a machine and its work."""

    records: tuple[MatchedRecord, ...]
    """Exact ones first, then by distance; newer before older, of one day the fastest."""
    refused: tuple[str, ...]  # records that cannot be true or cannot be read: one line each


def find_matches(here: Machine, workload: Workload, store: Store | None = None) -> StoreMatches:
    """Return the records that count here, by default of the user's own store."""
    store = store or user_store()
    try:
        keys = list(store.sizes(record_folder(workload)))[:MAX_CONSIDERED]
        files = list(store.read(keys))
    except AutotuneError as error:  # a search does without a store that does not answer
        return StoreMatches((), (error.message,))
    found = []
    for file in files:
        if file.record is None:
            continue
        match = compare(file.record, here, workload)
        if match.kind != "none":
            trials = usable_trials(file.record, here)
            found.append(MatchedRecord(file.name, file.record, match, trials))

    def rank(item: MatchedRecord) -> tuple[object, ...]:
        age, seconds = -item.record.measured_on.toordinal(), item.record.expected.step_seconds
        return item.match.kind != "exact", item.match.distance, age, seconds, item.name

    refused = (file.problem for file in files if file.record is None)
    return StoreMatches(tuple(sorted(found, key=rank)), tuple(refused))


def compare(record: Record, here: Machine, workload: Workload) -> Match:
    """Compare a record with this machine and this work."""
    ours, theirs = workload.model, record.workload.model
    if (ours.architecture, ours.num_parameters) != (theirs.architecture, theirs.num_parameters):
        return Match("none", math.inf, (f"architecture: {theirs.name} there, {ours.name} here",))
    machine = compare_machine(record, here)
    if machine.kind == "none":
        return machine
    found = dict(_differences(_work_facts(record.workload), _work_facts(workload)))
    reasons = (*machine.reasons, *found)
    if not found and workload_class(record.workload) != workload_class(workload):
        reasons += ("class of work",)  # the same largest bucket under another resolution
    if not record.conclusive:
        reasons += ("search: cut short or restricted there",)
    distance = machine.distance + sum(found.values())
    return Match("near" if reasons else "exact", distance, reasons)


def compare_machine(record: Record, here: Machine) -> Match:
    """Compare a record with this machine alone, whatever the work."""
    there = record.machine
    names = sorted({*there.match_keys, *here.match_keys})
    keys = ((name, there.match_keys.get(name), here.match_keys.get(name)) for name in names)
    decisive = tuple(
        f"{KEY_NAMES.get(name, name)}: {theirs or 'none'} there, {ours or 'none'} here"
        for name, theirs, ours in keys
        if theirs != ours
    )
    unusable = _unusable_trials(record, here)
    libraries = tuple(sorted(set(unusable.values())))
    if decisive or len(unusable) == len(record.trials):
        return Match("none", math.inf, decisive or libraries)
    tolerance = NOISY_RATE_TOLERANCE if here.noisy or there.noisy else RATE_TOLERANCE
    found = dict(_differences(_machine_facts(there, tolerance), _machine_facts(here, tolerance)))
    ran_out = any(trial.outcome in ("oom", "spill") for trial in record.trials)
    largest = max(trial.peak_memory_bytes or 0 for trial in record.trials)
    was_short = ran_out or largest > MEMORY_BOUND * there.budget_bytes
    if was_short and here.budget_bytes > (1 + MORE_MEMORY) * there.budget_bytes:
        ratio = max(there.budget_bytes, 1) / here.budget_bytes
        found[f"memory budget: {ratio:.2f} times ours"] = -math.log2(ratio)
    reasons = (*libraries, *found)
    return Match("near" if reasons else "exact", sum(found.values()), reasons)


def usable_trials(record: Record, here: Machine) -> tuple[TrialResult, ...]:
    """Return the trials on the same libraries, less OOMs of a smaller budget than ours."""
    unusable = _unusable_trials(record, here)
    is_smaller = record.machine.budget_bytes < SAME_BUDGET * here.budget_bytes
    return tuple(
        trial
        for index, trial in enumerate(record.trials)
        if index not in unusable and not (is_smaller and trial.outcome == "oom")
    )


def _unusable_trials(record: Record, here: Machine) -> dict[int, str]:
    ours, theirs = here.versions, record.machine.versions
    major, _, minor = (here.match_keys["compute_capability"] or "0.0").partition(".")
    capability = int(major), int(minor)
    native_is_cudnn = any(prefers_cudnn(capability, versions.cudnn) for versions in (ours, theirs))
    found = {}
    for index, trial in enumerate(record.trials):
        for library in _libraries(trial.candidate, native_is_cudnn):
            own, other = getattr(ours, library) or "none", getattr(theirs, library) or "none"
            if own != other:
                found[index] = f"trials on {library}: {other} there, {own} here"
    return found


def _libraries(candidate: Candidate, native_is_cudnn: bool) -> Iterator[str]:
    attention = ATTENTION_BACKENDS.get(candidate.attention)
    for entry in (attention, WEIGHT_FORMATS.get(candidate.quantization)):
        if entry is not None and entry.needs.library is not None:
            yield entry.needs.library
    kernel = attention.kernel if attention else ""
    if kernel == "cudnn" or (kernel == "fused" and native_is_cudnn):
        yield "cudnn"


class Fact(NamedTuple):
    """Something that shades a measurement without deciding whether it counts."""

    value: str | float | None
    weight: float  # how much it shifts step time and memory: a judgment
    tolerance: float = 0.0  # relative difference of a quantity up to which two count as the same


def _machine_facts(machine: Machine, rate_tolerance: float) -> dict[str, Fact]:
    def fastest(prefix: str) -> Fact:  # shapes differ between versions of the probe
        rates = (rate.value for rate in machine.rates if rate.name.startswith(prefix))
        return Fact(max(rates, default=None), 2.0, rate_tolerance)

    trains_on_cpu = machine.match_keys.get("device_kind") == "cpu"
    return {
        "device": Fact(machine.device_name, 1.0),
        "cores": Fact(machine.logical_cores if trains_on_cpu else None, 1.0),
        "memory": Fact(machine.total_memory_bytes, 1.0, 0.03),
        "memory bandwidth": fastest("memory.bandwidth"),
        "bf16 matmul rate": fastest("matmul.bf16."),
        "fp16 matmul rate": fastest("matmul.fp16."),
        "power limit": Fact(machine.power_limit_watts, 1.0, 0.03),
    }


def _work_facts(work: Workload) -> dict[str, Fact]:
    bucket = work.largest_bucket
    return {
        "pixels": Fact(bucket.width_px * bucket.height_px, 2.0),
        "frames": Fact(bucket.num_frames, 2.0),
        "longest caption": Fact(work.max_text_tokens, 0.5, 0.25),
        "mean caption length": Fact(mean_text_tokens(work), 0.5, 0.25),
        "caption padding": Fact(work.text_padding, 0.5),
        "rank": Fact(work.rank, 0.5),
        "adapted layers": Fact(work.targets, 1.0),
        "preserved prior": Fact(str(work.preserve_prior > 0), 0.5),
        "adapter dropout": Fact(str(work.lora_dropout > 0), 0.5),
        "adapted blocks": Fact(work.adapted_blocks, 1.0),
        "kind of adapter": Fact(work.adapter.removeprefix("rs"), 2.0),
        "factor of LoKr": Fact(str(work.lokr_factor), 0.5),  # 0 chooses it
        "optimizer": Fact(work.optimizer.name, 0.5),
        "effective batch size": Fact(work.effective_batch_size, 0.5),
        "control images": Fact(str(work.num_control_images), 1.0),
        "quality floor": Fact(work.quality, 0.05),
        "objective": Fact(work.objective, 0.05),
    }


def _differences(
    there: Mapping[str, Fact], here: Mapping[str, Fact]
) -> Iterator[tuple[str, float]]:
    # what one side does not know, or what is no quantity, is no difference
    for name, fact in here.items():
        ours, theirs, weight = fact.value, there[name].value, fact.weight
        if theirs is None or ours is None or theirs == ours:
            continue
        if isinstance(theirs, str) or isinstance(ours, str):
            yield f"{name}: {theirs} there, {ours} here", weight
        elif (smaller := min(theirs, ours)) > 0 and abs(theirs - ours) > fact.tolerance * smaller:
            ratio = theirs / ours
            yield f"{name}: {ratio:.2f} times ours", weight * abs(math.log2(ratio))


@dataclass(frozen=True)
class WarmStart:
    """Records' contribution to one search, whose knobs may have the values in `choices`."""

    matches: tuple[MatchedRecord, ...]
    choices: Mapping[str, Sequence[Choice]]
    budget_bytes: int
    cost: CostModel
    _surprises: dict[tuple[TrialResult, ...], dict[str, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def _admits(self, candidate: Candidate) -> bool:
        return all(getattr(candidate, name) in values for name, values in self.choices.items())

    @cached_property
    def sources(self) -> tuple[MatchedRecord, ...]:
        """Those whose settings are admitted, contradicted ones too: one exact, or the nearest."""
        used = tuple(item for item in self.matches if self._admits(item.record.settings))
        return used[: 1 if used and used[0].match.kind == "exact" else MAX_SOURCES]

    @cached_property
    def first_candidates(self) -> list[Candidate]:
        settings = dict.fromkeys(item.record.settings for item in self.sources)
        predicted = ((each, self.cost.predict_uncalibrated(each)) for each in settings)
        limit = BUDGET_MARGIN * self.budget_bytes
        fitting = [each for each, found in predicted if found.run_memory_bytes <= limit]
        return fitting[:MAX_FIRST_CANDIDATES]

    def priors(self, results: Sequence[TrialResult]) -> tuple[PriorResiduals, ...]:
        """Return what records taught that `results` do not contradict, the most similar first."""
        return tuple(
            source.prior_residuals
            for source in self.sources
            if source.prior_residuals.residuals and not self._find_contradiction(source, results)
        )

    def contradictions(self, results: Sequence[TrialResult]) -> tuple[str, ...]:
        """Return a line for each record that `results` contradict."""
        found = ((source, self._find_contradiction(source, results)) for source in self.sources)
        return tuple(f"{source.name[:12]} {reason}" for source, reason in found if reason)

    def _find_contradiction(
        self, source: MatchedRecord, results: Sequence[TrialResult]
    ) -> str | None:
        local = {result.candidate: result for result in results}
        if mismatch := self._find_mismatch(source, local):
            return f"does not hold here: {mismatch}"
        surprise = self._surprise(source, tuple(results))
        if surprise > MAX_SURPRISE:
            return "misleads: what ran here is predicted better without it"
        return None

    def _surprise(self, source: MatchedRecord, results: tuple[TrialResult, ...]) -> float:
        # a Bayes factor as a logarithm: above 0 if the record made these results less likely
        from autotune.cost.predict import prediction_errors

        known = self._surprises.setdefault(results, {})
        for priors in ((), (source.prior_residuals,)):
            name = source.name if priors else ""
            if name not in known:
                errors = prediction_errors(self.cost, results, priors)
                known[name] = math.fsum(error / v + math.log(v) for error, v in errors) / 2
        return known[source.name] - known[""]

    def _find_mismatch(
        self, source: MatchedRecord, local: Mapping[Candidate, TrialResult]
    ) -> str | None:
        recorded = source.winner
        if recorded is None or recorded.candidate not in local:
            return None
        trial = local[recorded.candidate]
        if trial.outcome != "ok":
            return f"it ended as {trial.outcome}"
        is_noisy = source.record.machine.noisy or self.cost.hardware.noisy
        memory = (trial.peak_memory_bytes or math.inf) / (recorded.peak_memory_bytes or 1)
        time = (trial.median_step_seconds or math.inf) / (recorded.median_step_seconds or 1)
        if abs(memory - 1) > MEMORY_TOLERANCE:
            return f"it takes {memory:.2f} times the recorded memory"
        if abs(time - 1) > (NOISY_TIME_TOLERANCE if is_noisy else TIME_TOLERANCE):
            return f"it takes {time:.2f} times the recorded time"
        return None

    def evidence(self, results: Sequence[TrialResult]) -> tuple[TrialResult, ...]:
        """Return the trials of a reproduced record: they explain why other settings lost."""
        local = {result.candidate: result for result in results}
        tried = (one for one in self.sources if one.winner and one.winner.candidate in local)
        reproduced = next((one for one in tried if not self._find_mismatch(one, local)), None)
        others = reproduced.trials if reproduced else ()
        untried = (trial for trial in others if trial.candidate not in local)
        return tuple(trial for trial in untried if self._admits(trial.candidate))
