"""What is done with whole stores: push and pull, export and import, verify, prune. Records keep
their bytes.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import IO

from autotune.errors import InvalidInput
from autotune.runtime import atomic_write, open_regular
from autotune.schema import TRIAL_PROTOCOL_VERSION
from autotune.sharing.record import MAX_RECORD_BYTES, Record
from autotune.sharing.store import MAX_RECORDS, RecordFile, Store, Transfer, parse_file

MAX_TRANSFER_BYTES = 1 << 30
"""Limit on new records in one push, pull or import: more than any team has measured, less than a
disk.
"""
EXPORTED_LINE = re.compile(
    rb'\{"name":"(?P<name>[0-9a-f]{64})","record":(?P<record>\{.*\})\}\r?\n?'
)
MAX_LINE_BYTES = MAX_RECORD_BYTES + 128


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


def export_store(store: Store, path: Path) -> int:
    """Write all valid records into one file of JSON lines; gives their number."""
    count = 0
    with atomic_write(path) as part, part.open("wb") as lines:
        for file in store.read():
            if file.record:
                lines.write(
                    b'{"name":"' + file.name.encode() + b'","record":' + file.content + b"}\n"
                )
                count += 1
    return count


def import_file(path: Path, store: Store) -> Transfer:
    """Add the records of a file that `export_store` wrote; bad lines are refused by number, the
    rest is taken.

    Raises:
        InvalidInput: the file cannot be read.
    """
    try:
        with open_regular(path) as lines:
            _require_transferable(os.fstat(lines.fileno()).st_size, str(path))
            return store.add_files(_parse_lines(lines), store.sizes())
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror}", hint="give a file of `profiles export`"
        ) from error


def _parse_lines(lines: IO[bytes]) -> Iterator[RecordFile]:
    for number in range(1, MAX_RECORDS + 2):
        line = lines.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if number > MAX_RECORDS or len(line) > MAX_LINE_BYTES:
            yield RecordFile("", b"", None, f"line {number} and what follows is too much")
            return
        matched = EXPORTED_LINE.fullmatch(line)
        if matched:
            yield parse_file(matched["name"].decode(), matched["record"])
        else:
            yield RecordFile("", b"", None, f"line {number} is not an exported record")


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
