"""What the stores know about a question: exact records first, then neighbors, and what no longer counts.

A record is advice: `warm_start.py` says what a search does with it. A `MatchedRecord` is a record that counts here, one
of the `StoreMatches` for a workload; a `WarmStartSource` is one that the search stands on, with the `PriorResiduals`
that its trials taught the cost model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.errors import AutotuneError
from autotune.schema import HardwareProfile, TrialResult, Workload
from autotune.sharing.keys import Match, compare, compare_work, usable_trials
from autotune.sharing.record import Record, architecture_folder, class_of, machine_folder, machine_of
from autotune.sharing.store import Entry, Found, Store, own_store

MAX_CONSIDERED = 500
"""Records opened for one question: those of machines with these hard keys first, and of the same class of work."""
REACH = 10.0
"""Distance at which a record's lesson weighs 1/e. It corrects predictions, not times, so it carries over between
machines whose rates differ."""
KINDS = ("exact", "upgraded", "near")
"""Of matches that count, the best first."""


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
        """Of what it taught the cost model, in (0, 1]."""
        return math.exp(-self.match.distance / REACH)


@dataclass(frozen=True)
class StoreMatches:
    """The answer of the stores."""

    known: tuple[MatchedRecord, ...]
    """Exact ones first, then those before an upgrade, then by distance; newer before older, of one day the fastest."""
    stale: tuple[str, ...]
    """Records of this very device that no longer count, or only in part, after a change here: one line each."""
    refused: tuple[str, ...]
    """Records that cannot be true or cannot be read: one line each."""


def find_matches(hardware: HardwareProfile, workload: Workload, stores: Sequence[Store] | None = None) -> StoreMatches:
    """Ask the user's own store, or `stores`.

    Args:
        hardware: this machine; with measured rates the distance is better.
        workload: the question.
        stores: where to look instead.
    """
    found: dict[str, MatchedRecord] = {}
    stale: dict[str, str] = {}
    refused: dict[str, str] = {}
    for store in (own_store(),) if stores is None else stores:
        for entry in _asked(store, hardware, workload, refused):
            record, name = entry.record, entry.name
            matched = compare(record, hardware, workload) if record else None
            if record is None or matched is None or (matched.kind != "none" and entry.problem):
                refused[name] = entry.problem or entry.damage
                continue
            if matched.kind != "none":
                found[name] = MatchedRecord(name, record, matched, usable_trials(record, hardware))
            if matched.kind != "exact" and _was_here(record, hardware, workload):
                verdict = {"none": "no longer counts", "upgraded": "is from before an upgrade, and verified first"}
                told = verdict.get(matched.kind, "counts as a prior only")
                stale[name] = f"{name[:12]} {told}: {'; '.join(matched.reasons)}"
    ordered = sorted(found.values(), key=lambda item: (KINDS.index(item.match.kind), item.match.distance, _age(item)))
    if ordered and ordered[0].match.kind == "exact":
        stale = {}  # measured again since
    return StoreMatches(tuple(ordered), tuple(stale.values()), tuple(refused.values()))


def _asked(store: Store, hardware: HardwareProfile, workload: Workload, refused: dict[str, str]) -> Iterator[Found]:
    """What a store has on the question; where it does not answer, `refused` says so, and a search does without."""
    try:
        yield from store.contents(_candidates(store, hardware, workload))
    except AutotuneError as error:
        refused[store.where] = error.message


def _candidates(store: Store, hardware: HardwareProfile, workload: Workload) -> list[Entry]:
    """Where records of this architecture lie: of machines with these hard keys first, of this class of work first."""
    machine, architecture = machine_folder(machine_of(hardware)), architecture_folder(workload)
    work = class_of(workload)

    def order(entry: Entry) -> tuple[bool, bool, str]:
        there = entry.key.split("/")
        return there[0] != machine, there[2] != work, entry.key

    entries = [entry for entry in store.entries() if entry.key.split("/")[1] == architecture]
    return sorted(entries, key=order)[:MAX_CONSIDERED]


def _was_here(record: Record, hardware: HardwareProfile, workload: Workload) -> bool:
    """Whether it reads as this very device's record of this very work, before something was upgraded."""
    machine, device = record.machine, hardware.device
    same_device = machine.device_name == device.name and machine.match_keys.get("device_kind") == device.kind
    return same_device and machine.total_memory_bytes == device.total_memory_bytes and same_work(record, workload)


def same_work(record: Record, workload: Workload) -> bool:
    """Whether nothing differs that times or memory depend on: quality floor and objective only choose among trials."""
    ours = workload.model_copy(update={"quality": record.workload.quality, "objective": record.workload.objective})
    return compare_work(record, ours).kind == "exact"


def _age(item: MatchedRecord) -> tuple[int, float, str]:
    return -item.record.day.toordinal(), item.record.expected.step_seconds, item.name
