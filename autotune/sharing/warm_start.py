"""What a search does with the records that count here, and when it stops believing them. Pure.

A record only proposes. Its settings are tried first where they are in the local space and predicted to fit; what it
taught the cost model is believed as far as its machine is alike; and what it promises holds once local trials have
reproduced it. A record that the cost model or a local trial contradicts is named, and nothing more is taken from it. So
a wrong record can cost trials, and nothing else: only settings that ran here may win, and only what this machine's own
search space admits is ever a fallback.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.cost import Predictor, PriorResiduals
from autotune.runtime import __version__
from autotune.schema import Candidate, Prediction, Residual, TrialResult, Workload
from autotune.sharing.query import KINDS, MatchedRecord, StoreMatches, same_work
from autotune.sharing.record import Record

MOST_RECORDS = 3
"""Records of similar machines that a search stands on."""
MOST_FIRST = 2
"""Settings that won on similar machines and are tried first."""
SAME_MEMORY = 0.03
SAME_TIME = 0.10
"""A promise is kept when a local trial is this near."""
BELIEVED_TIME = (1 / 3, 10.0)
BELIEVED_MEMORY = (1 / 1.5, 3.0)
"""Measured over predicted: least and most that is believed unseen. What is slow or large does no harm, and true trials
on a busy CPU have been 4 times as slow as predicted."""
MISLEADING = math.log(3.0)
"""Logarithm of the factor between what a record leads to expect and a trial here from which it is not believed."""
ROOM = 1.1
"""Share of the budget that settings that ran elsewhere may be predicted to take, and still be tried first: predictions
are that far off at most in 95 of 100 cases, and trials have a cap."""


@dataclass(frozen=True)
class WarmStartSource:
    """A record that a search stands on."""

    name: str
    trials: tuple[TrialResult, ...]
    """Those that count, of settings that are in the local search space."""
    promises: tuple[TrialResult, ...]
    """What must be reproduced here before nothing else need be tried; empty where another machine measured it."""
    prior_residuals: PriorResiduals
    """What its trials taught the cost model there."""


@dataclass(frozen=True)
class WarmStart:
    """What the records say to one search."""

    grounds: tuple[WarmStartSource, ...]
    """One that is exact or from before an upgrade, else the nearest few."""
    first: tuple[Candidate, ...]
    """Tried before all others."""
    cost: Predictor

    def priors(self, results: Sequence[TrialResult]) -> tuple[PriorResiduals, ...]:
        """What the records taught the cost model, less those that `results` contradict; the most alike first."""
        return tuple(
            g.prior_residuals for g in self.grounds if g.prior_residuals.residuals and not self._doubt(g, results)
        )

    def doubts(self, results: Sequence[TrialResult]) -> tuple[str, ...]:
        """Records that `results` contradict, one line each."""
        return tuple(f"{g.name[:12]} {why}" for g in self.grounds if (why := self._doubt(g, results)))

    @property
    def records(self) -> tuple[str, ...]:
        """Names of the records, those that turned out wrong too: without them the search would have gone otherwise."""
        return tuple(ground.name for ground in self.grounds)

    def _doubt(self, ground: WarmStartSource, results: Sequence[TrialResult]) -> str | None:
        here = {result.candidate: result for result in results}
        for promised in ground.promises:
            if promised.candidate in here and (broken := broken_promise(promised, here[promised.candidate])):
                return f"does not hold here: {broken}"
        for candidate, there in ground.prior_residuals.residuals:
            residual = self.cost.residual(here[candidate]) if candidate in here else None
            if residual and abs(residual.time - there.time) > MISLEADING:
                times = math.exp(residual.time - there.time)
                return f"misleads: {candidate.label()} takes {times:.2g} times as long as it leads to expect"
        return None

    def kept(self, results: Sequence[TrialResult]) -> bool:
        """Whether `results` reproduce all that a record promises, so that nothing else need be tried."""
        return self._kept(results) is not None

    def _kept(self, results: Sequence[TrialResult]) -> WarmStartSource | None:
        here = {result.candidate: result for result in results}
        for ground in self.grounds:
            winner, *others = ground.promises or (None,)
            promises = [winner, *(trial for trial in others if trial.candidate in self.first)]
            if all(t and t.candidate in here and not broken_promise(t, here[t.candidate]) for t in promises):
                return ground
        return None

    def evidence(self, results: Sequence[TrialResult]) -> tuple[TrialResult, ...]:
        """Trials of a record whose promises were kept explain, too, why others lost."""
        ground = self._kept(results)
        here = {result.candidate for result in results}
        return tuple(trial for trial in ground.trials if trial.candidate not in here) if ground else ()


NO_WARM_START: WarmStart = WarmStart((), (), None)  # type: ignore[arg-type]


def build_warm_start(
    found: StoreMatches, candidates: Iterable[Candidate], budget_bytes: int, workload: Workload, cost: Predictor
) -> tuple[StoreMatches, WarmStart]:
    """What of `found` a search among `candidates` stands on; and `found` with that alone, and what is not believed."""
    used: list[MatchedRecord] = []
    grounds: list[WarmStartSource] = []
    odd: list[str] = []
    space = frozenset(candidates)
    as_asked = (_as_asked(item, space) for item in found.known)
    for item in sorted(as_asked, key=lambda item: KINDS.index(item.match.kind)):
        if len(grounds) == MOST_RECORDS or any(ground.promises for ground in grounds):
            break
        if item.record.settings in space:
            if why := next(_oddities(item.record, workload, cost), None):
                odd.append(f"{item.name[:12]} is not believed: {why}")
                continue
            local = tuple(trial for trial in item.trials if trial.candidate in space)
            used.append(item)
            grounds.append(
                WarmStartSource(item.name, local, _promises(item), PriorResiduals(tuple(_residuals(item)), item.weight))
            )
    proposed = [t.candidate for g in grounds for t in g.promises] or [item.record.settings for item in used]
    fitting = [c for c in dict.fromkeys(proposed) if c in space and _has_room(cost.uncalibrated(c), budget_bytes)]
    advice = WarmStart(tuple(grounds), tuple(fitting[:MOST_FIRST]), cost)
    return replace(found, known=tuple(used), refused=(*found.refused, *odd)), advice


def _as_asked(item: MatchedRecord, space: frozenset[Candidate]) -> MatchedRecord:
    """A prior only where knobs were pinned or had values excluded that are free here: else it answers the question."""
    free = [name for name in item.record.narrowed if len({getattr(c, name, None) for c in space}) > 1]
    if not free:
        return item
    told = f"search: narrowed down there in {', '.join(free)}"
    return replace(item, match=replace(item.match, kind="near", reasons=(*item.match.reasons, told)))


def _has_room(prediction: Prediction, budget_bytes: int) -> bool:
    return prediction.required_memory_bytes <= ROOM * budget_bytes


def _promises(item: MatchedRecord) -> tuple[TrialResult, ...]:
    """The winner's trial; and where a library was upgraded, the fastest that ran on it, since it may be faster now."""
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
    """Of the trials that count, if they were compared with the cost model of this version."""
    record = item.record
    if record.autotune_version == __version__:
        for trial, residual in zip(record.trials, record.calibration, strict=False):
            if residual and trial in item.trials:
                yield trial.candidate, residual


def _oddities(record: Record, workload: Workload, cost: Predictor) -> Iterator[str]:
    """What the cost model of the record's own machine contradicts. Other work is left to local trials."""
    if not same_work(record, workload):
        return
    rates = record.machine.rates or cost.hardware.rates
    there = cost.beside(cost.hardware.model_copy(update={"rates": rates}))
    for number, trial in enumerate(record.trials, start=1):
        residual = there.residual(trial)
        least, most = BELIEVED_TIME if not record.machine.noisy else (0.0, math.inf)  # such rates contradict nothing
        if residual and not least <= (times := math.exp(residual.time)) <= most:
            yield f"trial {number} took {times:.2g} times the time that is predicted for its machine"
        if residual and not BELIEVED_MEMORY[0] <= (times := math.exp(residual.memory)) <= BELIEVED_MEMORY[1]:
            yield f"trial {number} took {times:.2g} times the memory that is predicted"


def broken_promise(promised: TrialResult, trial: TrialResult) -> str | None:
    """Why a local trial of the same settings does not reproduce what was measured; None when it does."""
    seconds, peak = trial.median_step_seconds, trial.peak_memory_bytes
    if trial.outcome != "ok" or not seconds or not peak:
        return f"it ended as {trial.outcome}"
    time, memory = seconds / (promised.median_step_seconds or math.inf), peak / (promised.peak_memory_bytes or math.inf)
    if abs(memory - 1) > SAME_MEMORY:
        return f"it takes {memory:.2f} times the promised memory"
    if abs(time - 1) > SAME_TIME:
        return f"it takes {time:.2f} times the promised time"
    return None
