"""What a search does with the records that count here, and when it stops relying on them. Pure.

A record only proposes. Its settings are tried first if they are in the local space and predicted to
fit; what it taught the cost model is trusted as far as its machine is similar; and its measurements
hold once local trials have reproduced them. A record that the cost model or a local trial
contradicts is named, and nothing more is taken from it. So a wrong record can cost trials, and
nothing else: only settings that ran here may win, and only what this machine's own search space
admits is ever a fallback.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autotune.cost.calibration import PriorResiduals
from autotune.cost.predict import CostModel
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.trial import Residual, TrialResult
from autotune.plan.workload import Workload
from autotune.share.matching import MATCH_ORDER, MatchedRecord, StoreMatches, is_same_work
from autotune.share.record import Record
from autotune.system.version import __version__

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
