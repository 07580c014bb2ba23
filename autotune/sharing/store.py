"""Stores of records: append-only, one file per record, named by its content. Two stores merge by union.

    <hard keys>/<architecture>/<class of work>/<sha256 of the content>.json

What is read is data from elsewhere: taken only if it is whole, unaltered, valid, filed where it belongs and possible.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.runtime import data_path
from autotune.schema import HardwareProfile, Residual, TrainingPlan
from autotune.sharing.files import Files, LocalFiles, RemoteFiles
from autotune.sharing.plausibility import implausible
from autotune.sharing.record import MAX_RECORD_BYTES, DamagedRecord, ForeignRecord, Record, parse_record, record_of

MAX_RECORDS = 100_000
"""In one store or file."""
NO_FOLDER = re.compile(r"(?P<login>[\w.+-]+@[\w.-]+:)|[a-z][a-z0-9+]+:/|$")
"""How addresses begin that git or fsspec would know; or they are empty. A folder of such a name would be made here."""
BATCH = 64
"""Files asked for at once; object stores answer them side by side."""


@dataclass(frozen=True)
class Entry:
    """One record's place in a store, known without opening it."""

    key: str
    """Path inside the store."""
    size: int

    @property
    def name(self) -> str:
        """The record's name, as far as its file tells the truth."""
        return self.key.rpartition("/")[2].removesuffix(".json")


@dataclass(frozen=True)
class Found:
    """The bytes of one record with what is in them."""

    name: str
    content: bytes
    record: Record | None
    damage: str = ""
    """Why there is no record in them."""
    key: str = ""
    """Path inside a store."""
    is_foreign: bool = False
    """Whether another autotune can read it."""

    @property
    def problem(self) -> str | None:
        """Why nobody should take it: what is damaged, or cannot be true."""
        if self.record is None:
            return self.damage
        reasons = implausible(self.record)
        return f"{self.name[:12]} cannot be true: {reasons[0]}" if reasons else None


@dataclass(frozen=True)
class Merged:
    """What a push, a pull or an import did."""

    new: int
    present: int
    refused: tuple[str, ...]
    """Why each was not taken, with its name."""


class Store:
    """Records behind one address."""

    def __init__(self, files: Files) -> None:
        self.files, self.where = files, files.where

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every record by its path; opens no file.

        Raises:
            InvalidInput: there are more than any team could have measured.
            Unreachable: the store does not answer.
        """
        sizes = self.files.sizes()
        if len(sizes) > MAX_RECORDS:
            raise InvalidInput(f"{self.where} has over {MAX_RECORDS} records", hint="use several stores")
        return sizes

    def entries(self) -> tuple[Entry, ...]:
        """Every record's place, in a fixed order; opens no file, raises what `sizes` does."""
        return tuple(Entry(key, size) for key, size in sorted(self.sizes().items()))

    def contents(self, entries: Iterable[Entry] | None = None) -> Iterator[Found]:
        """What is in each entry, or in all."""
        todo = list(self.entries() if entries is None else entries)
        for start in range(0, len(todo), BATCH):
            batch = {entry.key: entry for entry in todo[start : start + BATCH]}
            sizes = {key: min(entry.size, MAX_RECORD_BYTES + 1) for key, entry in batch.items()}
            for key, content in self.files.read(sizes):
                name = batch[key].name
                if isinstance(content, FileNotFoundError):
                    continue  # deleted since it was listed
                if isinstance(content, Exception):
                    damage = f"{name[:12]} cannot be read: {type(content).__name__}"
                    yield Found(name, b"", None, damage, key)
                else:
                    yield examined(name, content, key)

    def records(self, entries: Iterable[Entry] | None = None) -> Iterator[tuple[str, Record]]:
        """The sound records among the entries, or among all, by name."""
        return ((found.name, found.record) for found in self.contents(entries) if found.record)

    def take(self, found: Iterable[Found], there: Mapping[str, int]) -> Merged:
        """File what is sound, possible and not `there`, in batches: what was filed stays if a later batch fails."""
        new, present, refused = 0, 0, []
        batch: dict[str, bytes] = {}
        for one in found:
            if problem := one.problem:
                refused.append(problem)
                continue
            if there.get(one.key) == len(one.content):  # else absent, or cut off
                present += 1
                continue
            batch[one.key] = one.content
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

    def entry(self, prefix: str) -> Entry:
        """The place of the record whose name begins with `prefix`.

        Raises:
            InvalidInput: none does, or several do.
        """
        entries = [entry for entry in self.entries() if len(prefix) >= 4 and entry.name.startswith(prefix.lower())]
        if len(entries) != 1:
            which = "no record begins" if not entries else f"{len(entries)} records begin"
            hint = "`autotune profiles list` shows their names; give at least 4 digits"
            raise InvalidInput(f"{which} with {prefix!r} in {self.where}", hint=hint)
        return entries[0]

    def find(self, prefix: str) -> tuple[str, Record]:
        """The name that begins with `prefix`, and its record.

        Raises:
            InvalidInput: none does, or several do.
            DamagedRecord: its file is no record.
        """
        entry = self.entry(prefix)
        found = next(self.contents([entry]), Found(entry.name, b"", None, f"{entry.name[:12]} was deleted just now"))
        if found.record is None:
            raise DamagedRecord(found.damage, hint="`autotune profiles prune` deletes such files")
        return found.name, found.record


def examined(name: str, content: bytes, key: str = "") -> Found:
    """What is in these bytes, that are said to be the record of this name (and to lie at this path)."""
    try:
        record = parse_record(content, name)
    except DamagedRecord as error:
        return Found(name, content, None, error.message, key, isinstance(error, ForeignRecord))
    place = f"{record.folder}/{name}.json"
    if key not in ("", place):
        return Found(name, content, None, f"{name[:12]} lies in a folder where it does not belong", key)
    return Found(name, content, record, key=place)


def open_store(url: str, **options: Any) -> Store:
    """The store at a folder or a URL that fsspec speaks; `options` go to its file system.

    Raises:
        InvalidInput: fsspec knows no such protocol, or its package is missing.
        Unreachable: it refuses.
    """
    protocol, separator, rest = url.partition("://")
    if not separator and (wrong := NO_FOLDER.match(url)) and not os.path.lexists(url):
        if wrong["login"]:
            raise InvalidInput(f"{url!r} is no store: git keeps it", hint="clone it and name the checkout's folder")
        raise InvalidInput(f"{url!r} is neither a folder nor a URL", hint="URLs have two slashes: s3://bucket/path")
    if not separator or protocol in {"file", "local"}:
        return Store(LocalFiles(Path(os.path.expanduser(rest if separator else url))))  # noqa: PTH111  Path's may raise
    return Store(RemoteFiles(url, options))


def own_store() -> Store:
    """This user's records: what was planned here and what was pulled."""
    return Store(LocalFiles(data_path("profiles")))


def remember(plan: TrainingPlan, hardware: HardwareProfile, calibration: tuple[Residual | None, ...] = ()) -> str:
    """Keep what a plan just measured on this machine in the user's own store; the record's name.

    Raises:
        InvalidInput: the plan is no evidence; see `record_of`.
    """
    record = record_of(plan, hardware, calibration)
    own_store().add(record)
    return record.name
