"""What the stores know about a machine and its work: exact records first, then neighbors, and what
no longer counts.

A record is advice: `warm_start.py` says what a search does with it. A `MatchedRecord` is a record
that counts here, one of the `StoreMatches` for a workload; a `WarmStartSource` is one that the
search stands on, with the `PriorResiduals` that its trials taught the cost model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.errors import AutotuneError
from autotune.schema import HardwareProfile, TrialResult, Workload
from autotune.sharing.keys import Match, compare, compare_workload, usable_trials
from autotune.sharing.record import (
    Record,
    architecture_folder,
    machine_folder,
    shareable_machine,
    workload_class,
)
from autotune.sharing.store import Entry, RecordFile, Store, shipped_store, user_store

MAX_CONSIDERED = 500
"""Records opened for one search: those of machines with these match keys first, and of the same
class of work.
"""
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
    one day the fastest.
    """
    stale: tuple[str, ...]
    """Records of this very device that no longer count, or only in part, after a change here:
    one line each.
    """
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
        for file in _read_candidates(store, hardware, workload, refused):
            record, name = file.record, file.name
            match = compare(record, hardware, workload, budget_bytes) if record else None
            if record is None or match is None or (match.kind != "none" and file.problem):
                refused[name] = file.problem or file.damage
                continue
            if match.kind != "none":
                found[name] = MatchedRecord(
                    name, record, match, usable_trials(record, hardware, budget_bytes)
                )
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


def _read_candidates(
    store: Store, hardware: HardwareProfile, workload: Workload, refused: dict[str, str]
) -> Iterator[RecordFile]:
    """The files that may match; if the store does not answer, `refused` says so, and a search
    does without.
    """
    try:
        yield from store.read(_candidates(store, hardware, workload))
    except AutotuneError as error:
        refused[store.address] = error.message


def _candidates(store: Store, hardware: HardwareProfile, workload: Workload) -> list[Entry]:
    """Entries of this architecture: of machines with these match keys first, of this class of
    work first.
    """
    machine, architecture = (
        machine_folder(shareable_machine(hardware)),
        architecture_folder(workload),
    )
    work = workload_class(workload)

    def order(entry: Entry) -> tuple[bool, bool, str]:
        folders = entry.key.split("/")
        return folders[0] != machine, folders[2] != work, entry.key

    entries = [entry for entry in store.entries() if entry.key.split("/")[1] == architecture]
    return sorted(entries, key=order)[:MAX_CONSIDERED]


def _is_of_this_device(record: Record, hardware: HardwareProfile, workload: Workload) -> bool:
    """Whether it reads as this very device's record of this very work, before something was
    upgraded.
    """
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
    choose among trials.
    """
    ours = workload.changed(quality=record.workload.quality, objective=record.workload.objective)
    return compare_workload(record, ours).kind == "exact"


def _rank(item: MatchedRecord) -> tuple[object, ...]:
    age = -item.record.credible_day.toordinal()
    step_seconds = item.record.expected.step_seconds
    return MATCH_ORDER.index(item.match.kind), item.match.distance, age, step_seconds, item.name
