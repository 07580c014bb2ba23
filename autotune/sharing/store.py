"""Stores of records: append-only, one file per record, named by its content. Two stores merge by union.

    <hard keys>/<architecture>/<class of work>/<sha256 of the content>.json

What is read is data from elsewhere: taken only if it is whole, unaltered, valid, filed where it belongs and possible.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import platformdirs

import autotune
from autotune.atomic import replacing
from autotune.errors import InvalidInput
from autotune.frozen import TRIAL_PROTOCOL_VERSION
from autotune.schema import HardwareProfile, TrainingPlan
from autotune.sharing.files import KEY, Files, LocalFiles, open_files
from autotune.sharing.plausibility import implausible
from autotune.sharing.record import MAX_RECORD_BYTES, DamagedRecord, Record, parse_record, record_of

MAX_RECORDS = 100_000
"""In one store or file."""
MAX_TRANSFER_BYTES = 1 << 30
"""Of new records in one push, pull or import: more than any team has measured, less than a disk."""
BATCH = 64
"""Files asked for at once; object stores answer them side by side."""
LINE = re.compile(rb'\{"name":"(?P<name>[0-9a-f]{64})","record":(?P<record>\{.*\})\}\r?\n?')
"""Of an exported file. The record's bytes stay as they are: they are what its name stands for."""


@dataclass(frozen=True)
class Entry:
    """One record's place in a store, known without opening it."""

    hard: str
    architecture: str
    work: str
    name: str
    size: int

    @property
    def folder(self) -> str:
        """Folder inside the store."""
        return f"{self.hard}/{self.architecture}/{self.work}"

    @property
    def key(self) -> str:
        """Path inside the store."""
        return f"{self.folder}/{self.name}.json"


@dataclass(frozen=True)
class Refused:
    """A file that was not taken, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Merged:
    """What a push, a pull or an import did."""

    new: int
    present: int
    refused: tuple[Refused, ...]


Found = tuple[str, bytes, Record | DamagedRecord]
"""A name, the bytes under it, and the record in them or why there is none."""


class Store:
    """Records behind one address."""

    def __init__(self, files: Files) -> None:
        self.files, self.where = files, files.where

    def entries(self) -> tuple[Entry, ...]:
        """Every record's place, in a fixed order; opens no file.

        Raises:
            InvalidInput: there are more than any team could have measured.
            Unreachable: the store does not answer.
        """
        sizes = self.files.sizes()
        if len(sizes) > MAX_RECORDS:
            raise InvalidInput(f"{self.where} has over {MAX_RECORDS} records", hint="prune it, or use several stores")
        matches = ((KEY.fullmatch(key), size) for key, size in sorted(sizes.items()))
        return tuple(Entry(**found.groupdict(), size=size) for found, size in matches if found)

    def sizes(self) -> dict[str, int]:
        """Bytes of every record by its key."""
        return {entry.key: entry.size for entry in self.entries()}

    def contents(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes, Record | DamagedRecord]]:
        """The bytes of each entry with the record in them, or why there is none."""
        todo = list(entries)
        for start in range(0, len(todo), BATCH):
            batch = {entry.key: entry for entry in todo[start : start + BATCH]}
            sizes = {key: min(entry.size, MAX_RECORD_BYTES + 1) for key, entry in batch.items()}
            for key, content in self.files.read(sizes):
                entry = batch[key]
                if isinstance(content, Exception):
                    damage = DamagedRecord(f"{entry.name[:12]} cannot be read: {type(content).__name__}", hint="")
                    yield entry, b"", damage
                else:
                    yield entry, content, _record_or_damage(content, entry.name, entry.folder)

    def records(self, entries: Iterable[Entry] | None = None) -> Iterator[tuple[Entry, Record]]:
        """The sound records among the entries, or among all."""
        for entry, _, record in self.contents(self.entries() if entries is None else entries):
            if isinstance(record, Record):
                yield entry, record

    def take(self, found: Iterable[Found], there: Mapping[str, int]) -> Merged:
        """File what is sound, possible and not `there`, in batches: what was filed stays if a later batch fails."""
        new, present, refused = 0, 0, []
        batch: dict[str, bytes] = {}
        for name, content, record in found:
            if isinstance(record, DamagedRecord):
                refused.append(Refused(name, record.message))
            elif reasons := implausible(record):
                refused.append(Refused(name, f"{name[:12]} cannot be true: {reasons[0]}"))
            elif there.get(key := f"{record.folder}/{name}.json") == len(content):  # else absent, or cut off
                present += 1
            else:
                batch[key] = content
                new += 1
            if len(batch) == BATCH:
                self.files.write(batch)
                batch = {}
        self.files.write(batch)
        return Merged(new, present, tuple(refused))

    def add(self, *records: Record) -> int:
        """File records of this machine; how many were new."""
        there = self.sizes()
        contents = {f"{record.folder}/{record.name}.json": record.content for record in records}
        absent = {key: content for key, content in contents.items() if there.get(key) != len(content)}
        self.files.write(absent)
        return len(absent)

    def find(self, prefix: str) -> tuple[Entry, Record]:
        """The one record whose name begins with `prefix`.

        Raises:
            InvalidInput: none does, or several do.
            DamagedRecord: its file is no record.
        """
        found = [entry for entry in self.entries() if len(prefix) >= 4 and entry.name.startswith(prefix.lower())]
        if len(found) != 1:
            which = "no record begins" if not found else f"{len(found)} records begin"
            hint = "`autotune profiles list` shows their names; give at least 4 digits"
            raise InvalidInput(f"{which} with {prefix!r} in {self.where}", hint=hint)
        ((entry, _, record),) = self.contents(found)
        if isinstance(record, DamagedRecord):
            raise record
        return entry, record


def open_store(url: str, **options: Any) -> Store:
    """The store at a folder or a URL that fsspec speaks; `options` go to its file system.

    Raises:
        InvalidInput: fsspec knows no such protocol, or its package is missing.
    """
    return Store(open_files(url, **options))


def own_store() -> Store:
    """This user's records: what was planned here and what was pulled."""
    return Store(LocalFiles(platformdirs.user_data_path("autotune") / "profiles"))


def shipped_store() -> Store:
    """The records that come with the package; never written to."""
    return Store(LocalFiles(Path(autotune.__file__).parent / "profiles" / "records"))


def remember(plan: TrainingPlan, hardware: HardwareProfile) -> str:
    """Keep what a plan just measured on this machine in the user's own store; the record's name.

    Raises:
        InvalidInput: the plan is no evidence; see `record_of`.
    """
    record = record_of(plan, hardware)
    own_store().add(record)
    return record.name


def merge(source: Store, target: Store) -> Merged:
    """File in `target` whatever `source` has more; only what is new there is read."""
    there = target.sizes()
    entries = source.entries()
    wanted = [entry for entry in entries if there.get(entry.key) != entry.size]
    _require_moderate(sum(min(entry.size, MAX_RECORD_BYTES) for entry in wanted), source.where)
    found = ((entry.name, content, record) for entry, content, record in source.contents(wanted))
    merged = target.take(found, there)
    return Merged(merged.new, merged.present + len(entries) - len(wanted), merged.refused)


def _require_moderate(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_TRANSFER_BYTES:
        raise InvalidInput(f"{where} has {num_bytes / 2**30:.1f} GiB of new records", hint="no team has that many")


def verify(store: Store) -> tuple[int, tuple[Refused, ...]]:
    """How many records there are, and which are damaged, altered, misfiled or impossible."""
    count, bad = 0, []
    for count, (entry, _, record) in enumerate(store.contents(store.entries()), start=1):  # noqa: B007
        if isinstance(record, DamagedRecord):
            bad.append(Refused(entry.key, record.message))
        elif reasons := implausible(record):
            bad.append(Refused(entry.key, f"{entry.name[:12]} cannot be true: {reasons[0]}"))
    return count, tuple(bad)


def useless(store: Store, *, today: date, older_than_days: int | None = None) -> Iterator[tuple[Entry, str]]:
    """What `prune` would delete, and why: of another trial protocol, damaged, too old, or superseded.

    A newer record of the same machine, versions and work supersedes one of no more trials.
    """
    fullest: dict[tuple[object, ...], tuple[str, int]] = {}
    sound: list[tuple[Entry, Record]] = []
    for entry, _, record in store.contents(store.entries()):
        if isinstance(record, DamagedRecord):
            yield entry, record.message
        else:
            sound.append((entry, record))
    for entry, record in sorted(sound, key=lambda pair: (pair[1].measured_on, len(pair[1].trials)), reverse=True):
        newer, most = fullest.get(_subject(record), ("", 0))
        if record.machine.hard_keys.get("trial_protocol") != str(TRIAL_PROTOCOL_VERSION):
            yield entry, f"{entry.name[:12]} was measured by another trial protocol"
        elif len(record.trials) <= most:
            yield entry, f"{entry.name[:12]} is superseded by {newer[:12]}"
        elif older_than_days is not None and record.measured_on < today - timedelta(days=older_than_days):
            yield entry, f"{entry.name[:12]} is of {record.measured_on}"
        else:
            fullest[_subject(record)] = (entry.name, len(record.trials))


def prune(store: Store, *, older_than_days: int | None = None, dry_run: bool = False) -> tuple[str, ...]:
    """Delete what is useless; one line for each, saying why."""
    today = datetime.now(UTC).date()
    found = tuple(useless(store, today=today, older_than_days=older_than_days))
    for entry, _ in () if dry_run else found:
        store.files.delete(entry.key)
    return tuple(reason for _, reason in found)


def export_to(store: Store, file: Path) -> int:
    """Write all sound records into one file of JSON lines; how many."""
    count = 0
    with replacing(file) as part, part.open("wb") as lines:
        for entry, content, record in store.contents(store.entries()):
            if isinstance(record, Record):
                lines.write(b'{"name":"' + entry.name.encode() + b'","record":' + content + b"}\n")
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


def _found_in(lines: Any) -> Iterator[Found]:
    longest = MAX_RECORD_BYTES + 128
    for number in range(1, MAX_RECORDS + 2):
        line = lines.readline(longest + 1)
        if not line:
            return
        if number > MAX_RECORDS or len(line) > longest:
            yield f"line {number}", b"", DamagedRecord(f"line {number} and what follows is too much", hint="")
            return
        yield _found_on(line, number)


def _found_on(line: bytes, number: int) -> Found:
    matched = LINE.fullmatch(line)
    if matched is None:
        return f"line {number}", b"", DamagedRecord(f"line {number} is no exported record", hint="")
    name, content = matched["name"].decode(), matched["record"]
    return name, content, _record_or_damage(content, name)


def _record_or_damage(content: bytes, name: str, folder: str | None = None) -> Record | DamagedRecord:
    try:
        record = parse_record(content, name)
    except DamagedRecord as error:
        return error
    if folder not in (None, record.folder):
        return DamagedRecord(
            f"{name[:12]} lies in a folder where it does not belong", hint="move it back, or delete it"
        )
    return record


def _subject(record: Record) -> tuple[object, ...]:
    """What a newer record of the same replaces."""
    machine = record.machine
    versions = machine.versions.model_copy(update={"python": "", "driver": None})
    return record.folder, machine.device_name, machine.total_memory_bytes, versions, record.workload
