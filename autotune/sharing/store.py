"""Stores of records: append-only, one file per record, named by its content. Two stores merge by
union.

    <match keys>/<architecture>/<class of work>/<sha256 of the content>.json

Files come from elsewhere: a record is taken only if it is whole, unaltered, valid, in its folder
and possible.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.runtime import SCHEME, data_path, shipped_path
from autotune.schema import Frozen, HardwareProfile, Residual, TrainingPlan
from autotune.sharing.files import KEY, Files, LocalFiles, RemoteFiles
from autotune.sharing.plausibility import find_impossibilities
from autotune.sharing.record import (
    MAX_RECORD_BYTES,
    DamagedRecord,
    ForeignRecord,
    Record,
    build_record,
    parse_record,
)

MAX_RECORDS = 100_000
"""Limit on one store."""
BATCH_SIZE = 64
"""Files read or written at once; object stores transfer them in parallel."""


@dataclass(frozen=True)
class Entry:
    """One record's place in a store, known without opening it."""

    key: str
    """Path inside the store."""
    size: int

    @property
    def name(self) -> str:
        """The record's name, as its file says."""
        return self.key.rpartition("/")[2].removesuffix(".json")


@dataclass(frozen=True)
class RecordFile:
    """The bytes of one file with the record in them."""

    name: str
    content: bytes
    record: Record | None
    damage: str = ""
    """Why there is no record."""
    key: str = ""
    """Path inside a store."""
    is_foreign: bool = False
    """Whether another version of autotune can read it."""

    @property
    def problem(self) -> str | None:
        """Why nobody should take the record: it is damaged or cannot be true; None if it is
        sound.
        """
        if self.record is None:
            return self.damage
        reasons = find_impossibilities(self.record)
        return f"{self.name[:12]} cannot be true: {reasons[0]}" if reasons else None


class Transfer(Frozen):
    """What a push or a pull did.

    Example:
        >>> moved = autotune.pull_records("s3://team/records")
        >>> moved.num_new, moved.refused
    """

    num_new: int
    num_present: int
    refused: tuple[str, ...]
    """Why records were refused, one sentence each, with its name."""
    target: str
    """Where the records went."""


class Store:
    """Records behind one address."""

    def __init__(self, files: Files) -> None:
        self.files, self.address = files, files.address

    @property
    def is_missing_folder(self) -> bool:
        """Whether it is a folder of this machine that does not exist; what is elsewhere is made
        when it is written.
        """
        return isinstance(self.files, LocalFiles) and not self.files.root.exists()

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every record by its path; opens no file.

        Raises:
            InvalidInput: there are more than any team could have measured.
            StoreUnreachable: the store does not answer.
        """
        sizes = self.files.sizes()
        if len(sizes) > MAX_RECORDS:
            raise InvalidInput(
                f"{self.address} has over {MAX_RECORDS} records", hint="use several stores"
            )
        return sizes

    def entries(self) -> tuple[Entry, ...]:
        """Every record's place, in a fixed order; opens no file, raises what `sizes` does."""
        return tuple(Entry(key, size) for key, size in sorted(self.sizes().items()))

    def read(self, entries: Iterable[Entry] | None = None) -> Iterator[RecordFile]:
        """The files of these entries, or of all; those that were deleted since they were listed
        are left out.
        """
        todo = list(self.entries() if entries is None else entries)
        for start in range(0, len(todo), BATCH_SIZE):
            batch = {entry.key: entry for entry in todo[start : start + BATCH_SIZE]}
            sizes = {key: min(entry.size, MAX_RECORD_BYTES + 1) for key, entry in batch.items()}
            for key, content in self.files.read(sizes):
                name = batch[key].name
                if isinstance(content, FileNotFoundError):
                    continue
                if isinstance(content, Exception):
                    damage = f"{name[:12]} cannot be read: {type(content).__name__}"
                    yield RecordFile(name, b"", None, damage, key)
                else:
                    yield parse_file(name, content, key)

    def records(self, entries: Iterable[Entry] | None = None) -> Iterator[tuple[str, Record]]:
        """Name and record of each valid file among the entries, or among all."""
        return ((file.name, file.record) for file in self.read(entries) if file.record)

    def add_files(self, files: Iterable[RecordFile], sizes: Mapping[str, int]) -> Transfer:
        """Write, byte for byte, those files that are sound and absent from `sizes`, which is what
        the store has.

        Batches that were written stay if a later one fails.
        """
        new, present, refused = 0, 0, []
        batch: dict[str, bytes] = {}
        for file in files:
            if problem := file.problem:
                refused.append(problem)
            elif sizes.get(file.key) == len(file.content):  # otherwise it is absent or cut off
                present += 1
            else:
                batch[file.key] = file.content
                new += 1
            if len(batch) == BATCH_SIZE:
                self.files.write(batch)
                batch = {}
        self.files.write(batch)
        return Transfer(
            num_new=new, num_present=present, refused=tuple(refused), target=self.address
        )

    def add(self, *records: Record) -> int:
        """Write records that were made here; how many were new."""
        sizes = self.sizes()
        contents = {f"{record.folder}/{record.name}.json": record.content for record in records}
        absent = {
            key: content for key, content in contents.items() if sizes.get(key) != len(content)
        }
        self.files.write(absent)
        return len(absent)

    def entry(self, prefix: str) -> Entry:
        """The place of the record whose name begins with `prefix`.

        Raises:
            InvalidInput: none does, or several do.
        """
        entries = [
            entry
            for entry in self.entries()
            if len(prefix) >= 4 and entry.name.startswith(prefix.lower())
        ]
        if len(entries) != 1:
            which = "no record begins" if not entries else f"{len(entries)} records begin"
            hint = "`autotune profiles list` shows their names; give at least 4 digits"
            raise InvalidInput(f"{which} with {prefix!r} in {self.address}", hint=hint)
        return entries[0]

    def find(self, prefix: str) -> tuple[RecordFile, Record]:
        """The file whose name begins with `prefix`, and its record.

        Raises:
            InvalidInput: none does, or several do.
            DamagedRecord: the file is not a record.
        """
        entry = self.entry(prefix)
        deleted = RecordFile(entry.name, b"", None, f"{entry.name[:12]} was deleted just now")
        file = next(self.read([entry]), deleted)
        if file.record is None:
            raise DamagedRecord(file.damage, hint="`autotune profiles prune` deletes such files")
        return file, file.record


def parse_file(name: str, content: bytes, key: str = "") -> RecordFile:
    """The record in a file of this name, which lies at `key` if it comes from a store."""
    try:
        record = parse_record(content, name)
    except DamagedRecord as error:
        return RecordFile(name, content, None, error.message, key, isinstance(error, ForeignRecord))
    own_key = f"{record.folder}/{name}.json"
    if not KEY.fullmatch(own_key):
        return RecordFile(name, content, None, f"{name[:12]} belongs in no folder of a store", key)
    if key not in ("", own_key):
        return RecordFile(
            name, content, None, f"{name[:12]} is in a folder where it does not belong", key
        )
    return RecordFile(name, content, record, key=own_key)


def open_store(url: str, **options: Any) -> Store:
    """The store in a folder or at a URL that fsspec knows; `options` go to its file system.

    Raises:
        InvalidInput: fsspec knows no such protocol, or its package is missing.
        StoreUnreachable: the store refuses.
    """
    protocol, separator, rest = url.partition("://")
    if separator and protocol not in {"file", "local"}:
        return Store(RemoteFiles(url, options))
    path = os.path.expanduser(rest if separator else url)  # noqa: PTH111  Path's may raise
    if not os.path.lexists(path) and (
        not path or "@" in path or SCHEME.match(path)
    ):  # it would be made here
        raise InvalidInput(
            "the store's address is neither a folder nor a URL",  # which may hold a password
            hint="URLs have two slashes, s3://bucket/path; of a git repository name the folder of "
            "your clone; "
            "a new folder with @ in its name has to be made first",
        )
    return Store(LocalFiles(Path(path)))


def shipped_store() -> Store:
    """The records that ship with autotune: every search may start from them."""
    return Store(LocalFiles(shipped_path()))


def user_store() -> Store:
    """This user's records: what was planned on this machine and what was pulled."""
    return Store(LocalFiles(data_path("profiles")))


def save_record(
    plan: TrainingPlan, hardware: HardwareProfile, calibration: tuple[Residual | None, ...] = ()
) -> str:
    """Add what a plan just measured on this machine to the user's store; gives the record's name.

    Raises:
        InvalidInput: the plan is no evidence; see `build_record`.
    """
    record = build_record(plan, hardware, calibration)
    user_store().add(record)
    return record.name
