"""What is done with whole stores: push and pull, verify, prune. Records keep
their bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta

from autotune.errors import InvalidInput
from autotune.schema import TRIAL_PROTOCOL_VERSION
from autotune.sharing.record import MAX_RECORD_BYTES, Record
from autotune.sharing.store import RecordFile, Store, Transfer

MAX_TRANSFER_BYTES = 1 << 30
"""Limit on new records in one push or pull: more than any team has measured, less than a
disk.
"""


def merge_stores(source: Store, target: Store) -> Transfer:
    """Copy to `target` the records that only `source` has; nothing else is read."""
    sizes, entries = target.sizes(), source.entries()
    wanted = [entry for entry in entries if sizes.get(entry.key) != entry.size]
    _require_transferable(
        sum(min(entry.size, MAX_RECORD_BYTES) for entry in wanted), source.address
    )
    merged = target.add_files(source.read(wanted), sizes)
    return merged.changed(num_present=merged.num_present + len(entries) - len(wanted))


def _require_transferable(num_bytes: int, address: str) -> None:
    if num_bytes > MAX_TRANSFER_BYTES:
        raise InvalidInput(
            f"{address} has {num_bytes / 2**30:.1f} GiB of new records",
            hint="no team has that many",
        )


def verify_store(store: Store) -> tuple[int, tuple[str, ...]]:
    """The number of records, and why each bad one is bad: damaged, altered, misplaced or
    impossible.
    """
    problems = [file.problem for file in store.read()]
    return len(problems), tuple(problem for problem in problems if problem)


def prune_store(
    store: Store,
    names: Sequence[str] = (),
    *,
    older_than_days: int | None = None,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Delete the records whose names begin with `names`, or else those that are useless; one line
    for each says why.

    Raises:
        InvalidInput: no record's name begins with one of them, or several do; nothing is deleted
            then.
    """
    oldest = (
        None
        if older_than_days is None
        else datetime.now(UTC).date() - timedelta(days=older_than_days)
    )
    named = {entry.key: f"{entry.name[:12]} was named" for entry in map(store.entry, names)}
    useless = named if names else dict(_find_useless(store.read(), oldest))
    for key in () if dry_run else useless:
        store.files.delete(key)
    return tuple(useless.values())


def _find_useless(files: Iterable[RecordFile], oldest: date | None) -> Iterator[tuple[str, str]]:
    """Key of each record that is bad, of an older trial protocol, superseded or too old, and why.

    What a newer autotune measured is left to those who have it, whether this one can read it or
    not. A newer record of the same machine, versions and work supersedes one of no more trials.
    """
    sound: list[tuple[Record, RecordFile]] = []
    for file in files:
        if file.record and not file.problem:
            sound.append((file.record, file))
        elif not file.is_foreign:
            yield file.key, file.problem or file.damage
    fullest: dict[tuple[object, ...], tuple[str, int]] = {}
    for record, file in sorted(
        sound, key=lambda pair: (pair[0].credible_day, len(pair[0].trials)), reverse=True
    ):
        newer, max_trials = fullest.get(subject := _subject(record), ("", 0))
        name, protocol = file.name[:12], record.machine.match_keys.get("trial_protocol") or ""
        if protocol.isdecimal() and int(protocol) < TRIAL_PROTOCOL_VERSION:
            yield file.key, f"{name} was measured by an older trial protocol"
        elif len(record.trials) <= max_trials:
            yield file.key, f"{name} is superseded by {newer}"
        elif oldest and record.measured_on < oldest:
            yield file.key, f"{name} is of {record.measured_on}"
        else:
            fullest[subject] = (name, len(record.trials))


def _subject(record: Record) -> tuple[object, ...]:
    """What must be equal for a newer record to supersede an older one."""
    machine = record.machine
    versions = machine.versions.changed(python="", driver=None)
    same_search = (record.workload, record.conclusive, record.narrowed)
    return record.folder, machine.device_name, machine.total_memory_bytes, versions, same_search
