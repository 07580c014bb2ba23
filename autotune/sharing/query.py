"""What the stores know about a question: exact records first, then neighbours as priors, and what no longer counts.

A record is advice. Everything returned here is still to be tried: settings outside the local search space are left
out, memory is checked against the local budget by the search as for any candidate, and one local trial decides whether
a promise holds. So a wrong record can cost trials, and nothing else.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autotune.schema import Candidate, HardwareProfile, Outcome, TrialResult, Workload
from autotune.sharing.keys import Match, compare_work, match, usable_trials
from autotune.sharing.plausibility import Predict, implausible
from autotune.sharing.record import Record, architecture_folder, class_of
from autotune.sharing.store import Entry, Store, own_store, shipped_store

MAX_CONSIDERED = 500
"""Records opened for one question: those of the same class of work first."""
SAME_MEMORY = 0.03
SAME_TIME = 0.10
"""A promise is confirmed when a local trial is this near."""


@dataclass(frozen=True)
class Known:
    """A record that counts here."""

    name: str
    record: Record
    match: Match
    trials: tuple[TrialResult, ...]
    """Those that count: without the ones on a library of another version."""

    @property
    def confirmed(self) -> bool:
        """Whether its settings need one verification trial and nothing more."""
        return self.match.kind == "exact"

    @property
    def weight(self) -> float:
        """Of its trials as a prior, in (0, 1]."""
        return math.exp(-self.match.distance)


@dataclass(frozen=True)
class Survey:
    """The answer of the stores."""

    known: tuple[Known, ...]
    """Exact ones first, then by distance; newer before older."""
    stale: tuple[str, ...]
    """Records of this very device that no longer count, or only as priors, after a change here: one line each."""
    refused: tuple[str, ...]
    """Records that cannot be true or cannot be read: one line each."""


@dataclass(frozen=True)
class Prior:
    """One trial that somebody ran, as a belief about the same candidate here."""

    candidate: Candidate
    outcome: Outcome
    step_seconds: float | None
    """Median, of the record's work: comparable with ours only where `same_work`."""
    peak_memory_bytes: int | None
    weight: float
    same_work: bool
    """Whether it ran the same work, so that its numbers need no scaling."""
    record: str


def known(hardware: HardwareProfile, workload: Workload, stores: Sequence[Store] | None = None) -> tuple[Known, ...]:
    """The records that count for this machine and this work, exact ones first. See `survey` for what does not count."""
    return survey(hardware, workload, stores).known


def survey(
    hardware: HardwareProfile,
    workload: Workload,
    stores: Sequence[Store] | None = None,
    predict: Predict | None = None,
) -> Survey:
    """Ask the user's own store and the package's, or `stores`.

    Args:
        hardware: this machine; with measured rates the distance is better.
        workload: the question.
        stores: where to look instead.
        predict: the cost model's step seconds and peak bytes, to spot records that are possible but not believable.
    """
    found: dict[str, Known] = {}
    stale: dict[str, str] = {}
    refused: dict[str, str] = {}
    for store in (own_store(), shipped_store()) if stores is None else stores:
        for entry in store.contents(_candidates(store, workload)):
            record = entry.record
            if record is None:
                refused[entry.name] = entry.damage
                continue
            matched = match(record, hardware, workload)
            if matched.kind != "none" and (reasons := implausible(record, predict)):
                refused[entry.name] = f"{entry.name[:12]} cannot be true: {reasons[0]}"
                continue
            if matched.kind != "none":
                found[entry.name] = Known(entry.name, record, matched, usable_trials(record, hardware))
            if matched.kind != "exact" and _was_here(record, hardware, workload):
                verdict = "no longer counts" if matched.kind == "none" else "counts as a prior only"
                stale[entry.name] = f"{entry.name[:12]} {verdict}: {'; '.join(matched.reasons)}"
    ordered = sorted(found.values(), key=lambda item: (not item.confirmed, item.match.distance, _age(item), item.name))
    return Survey(tuple(ordered), tuple(stale.values()), tuple(refused.values()))


def priors(found: Iterable[Known], candidates: Collection[Candidate], workload: Workload) -> tuple[Prior, ...]:
    """The trials of records whose candidates are in the local search space, nearest record first."""
    space = frozenset(candidates)
    return tuple(
        Prior(
            candidate=trial.candidate,
            outcome=trial.outcome,
            step_seconds=trial.median_step_seconds,
            peak_memory_bytes=trial.peak_memory_bytes,
            weight=item.weight,
            same_work=_same_work(item.record, workload),
            record=item.name,
        )
        for item in found
        for trial in item.trials
        if trial.candidate in space
    )


def first_candidates(
    found: Iterable[Known], candidates: Collection[Candidate], budget_bytes: int, at_most: int = 2
) -> tuple[Candidate, ...]:
    """Settings that won elsewhere and may be tried first here: in the local space, their peak within the budget."""
    space = frozenset(candidates)
    promising = (item.record for item in found)
    fitting = (r.settings for r in promising if r.settings in space and r.expected.peak_memory_bytes <= budget_bytes)
    return tuple(dict.fromkeys(fitting))[:at_most]


def broken_promise(record: Record, trial: TrialResult) -> str | None:
    """Why a local trial of the record's settings does not confirm them; None when it does."""
    seconds, peak = trial.median_step_seconds, trial.peak_memory_bytes
    if trial.outcome != "ok" or not seconds or not peak:
        return f"it ended as {trial.outcome} here"
    time, memory = seconds / record.expected.step_seconds, peak / record.expected.peak_memory_bytes
    if abs(memory - 1) > SAME_MEMORY:
        return f"it takes {memory:.2f} times the promised memory here"
    if abs(time - 1) > SAME_TIME:
        return f"it takes {time:.2f} times the promised time here"
    return None


def _candidates(store: Store, workload: Workload) -> list[Entry]:
    """Where records of this architecture lie, those of the same class of work first."""
    architecture, work = architecture_folder(workload), class_of(workload)
    entries = [entry for entry in store.entries() if entry.key.split("/")[1] == architecture]
    return sorted(entries, key=lambda entry: (entry.key.split("/")[2] != work, entry.key))[:MAX_CONSIDERED]


def _was_here(record: Record, hardware: HardwareProfile, workload: Workload) -> bool:
    """Whether it reads as this very device's record of this very work, before something was upgraded."""
    machine, device = record.machine, hardware.device
    same_device = machine.device_name == device.name and machine.hard_keys.get("device_kind") == device.kind
    return same_device and machine.total_memory_bytes == device.total_memory_bytes and _same_work(record, workload)


def _same_work(record: Record, workload: Workload) -> bool:
    """Whether nothing differs that times or memory depend on: quality floor and objective only choose among trials."""
    ours = workload.model_copy(update={"quality": record.workload.quality, "objective": record.workload.objective})
    return compare_work(record, ours).kind == "exact"


def _age(item: Known) -> int:
    return -item.record.measured_on.toordinal()
