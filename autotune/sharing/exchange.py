"""What is done with whole stores: push and pull, export and import, verify, prune."""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import IO

from autotune.errors import InvalidInput
from autotune.runtime import atomic_write
from autotune.schema import TRIAL_PROTOCOL_VERSION
from autotune.sharing.record import MAX_RECORD_BYTES, Record
from autotune.sharing.store import MAX_RECORDS, Found, Merged, Store, examined

MAX_TRANSFER_BYTES = 1 << 30
"""Of new records in one push, pull or import: more than any team has measured, less than a disk."""
LINE = re.compile(rb'\{"name":"(?P<name>[0-9a-f]{64})","record":(?P<record>\{.*\})\}\r?\n?')
"""Of an exported file. The record's bytes stay as they are: they are what its name stands for."""


def merge(source: Store, target: Store) -> Merged:
    """File in `target` whatever `source` has more; only what is new there is read."""
    there, entries = target.sizes(), source.entries()
    wanted = [entry for entry in entries if there.get(entry.key) != entry.size]
    _require_moderate(sum(min(entry.size, MAX_RECORD_BYTES) for entry in wanted), source.where)
    merged = target.take(source.contents(wanted), there)
    return Merged(merged.new, merged.present + len(entries) - len(wanted), merged.refused)


def _require_moderate(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_TRANSFER_BYTES:
        raise InvalidInput(f"{where} has {num_bytes / 2**30:.1f} GiB of new records", hint="no team has that many")


def export_to(store: Store, file: Path) -> int:
    """Write all sound records into one file of JSON lines; how many."""
    count = 0
    with atomic_write(file) as part, part.open("wb") as lines:
        for found in store.contents():
            if found.record:
                lines.write(b'{"name":"' + found.name.encode() + b'","record":' + found.content + b"}\n")
                count += 1
    return count


def import_from(file: Path, store: Store) -> Merged:
    """File the records of a file that `export_to` wrote; what is wrong is refused by line, the rest is taken.

    Raises:
        InvalidInput: the file cannot be read.
    """
    try:
        _require_moderate(file.stat().st_size, str(file))
        with file.open("rb") as lines:
            return store.take(_found_in(lines), store.sizes())
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}", hint="give a file of `profiles export`") from error


def _found_in(lines: IO[bytes]) -> Iterator[Found]:
    longest = MAX_RECORD_BYTES + 128
    for number in range(1, MAX_RECORDS + 2):
        line = lines.readline(longest + 1)
        if not line:
            return
        if number > MAX_RECORDS or len(line) > longest:
            yield Found("", b"", None, f"line {number} and what follows is too much")
            return
        matched = LINE.fullmatch(line)
        if matched:
            yield examined(matched["name"].decode(), matched["record"])
        else:
            yield Found("", b"", None, f"line {number} is no exported record")


def verify(store: Store) -> tuple[int, tuple[str, ...]]:
    """How many records there are, and why each bad one is: damaged, altered, misfiled or impossible."""
    problems = [found.problem for found in store.contents()]
    return len(problems), tuple(problem for problem in problems if problem)


def prune(
    store: Store, names: Sequence[str] = (), *, older_than_days: int | None = None, dry_run: bool = False
) -> tuple[str, ...]:
    """Delete the records whose names begin so, or what is useless; one line for each, saying why.

    Raises:
        InvalidInput: no record's name begins so, or several do; nothing is deleted then.
    """
    oldest = None if older_than_days is None else datetime.now(UTC).date() - timedelta(days=older_than_days)
    named = {entry.key: f"{entry.name[:12]} was named" for entry in map(store.entry, names)}
    useless = named if names else dict(_useless(store.contents(), oldest))
    for key in () if dry_run else useless:
        store.files.delete(key)
    return tuple(useless.values())


def _useless(contents: Iterable[Found], oldest: date | None) -> Iterator[tuple[str, str]]:
    """Path of each record that is bad (see `verify`), of an older trial protocol, superseded or too old, and why.

    What a newer autotune measured is left to those who have it, whether this one can read it or not.
    A newer record of the same machine, versions and work supersedes one of no more trials.
    """
    fullest: dict[tuple[object, ...], tuple[str, int]] = {}
    sound: list[tuple[Record, Found]] = []
    for found in contents:
        if found.record and not found.problem:
            sound.append((found.record, found))
        elif not found.is_foreign:
            yield found.key, found.problem or found.damage
    for record, found in sorted(sound, key=lambda pair: (pair[0].day, len(pair[0].trials)), reverse=True):
        newer, most = fullest.get(subject := _subject(record), ("", 0))
        name, protocol = found.name[:12], record.machine.match_keys.get("trial_protocol") or ""
        if protocol.isdecimal() and int(protocol) < TRIAL_PROTOCOL_VERSION:
            yield found.key, f"{name} was measured by an older trial protocol"
        elif len(record.trials) <= most:
            yield found.key, f"{name} is superseded by {newer}"
        elif oldest and record.measured_on < oldest:
            yield found.key, f"{name} is of {record.measured_on}"
        else:
            fullest[subject] = (name, len(record.trials))


def _subject(record: Record) -> tuple[object, ...]:
    """What a newer record of the same replaces."""
    machine, answers = record.machine, (record.conclusive, record.narrowed)
    versions = machine.versions.model_copy(update={"python": "", "driver": None})
    return record.folder, machine.device_name, machine.total_memory_bytes, versions, record.workload, answers
