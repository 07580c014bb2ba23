"""Shared records: what machines measured, kept in the user's own store and exchanged with teams.

A store is a folder, a git checkout, or an address such as `s3://bucket/path`; None stands for the
user's own.
"""

from collections.abc import Sequence

from autotune.errors import InvalidInput, raise_typed
from autotune.machine.probe import probe as read_machine
from autotune.plan.base import Frozen
from autotune.plan.words import label_of
from autotune.share.store import (
    Store,
    Transfer,
    merge_stores,
    prune_store,
    shareable_machine,
    user_store,
    workload_class,
)
from autotune.share.warm_start import compare_machine


class RecordSummary(Frozen):
    """One record in a list."""

    name: str
    measured_on: str
    device_name: str
    family: str
    work: str
    settings: str
    num_trials: int
    step_seconds: float
    peak_memory_bytes: int
    match: str | None = None
    """Match with this machine, if that was asked: `exact`, `near` or `none`."""
    reasons: tuple[str, ...] = ()
    """Differences from this machine."""


@raise_typed
def push(url: str, *, create: bool = False) -> Transfer:
    """Copy your records to a team's store; only new ones travel. Raises InvalidInput if there is
    no such folder, unless `create` makes it.

    Examples:
        >>> autotune.records.push("s3://team/records").num_new
    """
    team = Store(url)
    if team.folder and not team.folder.exists() and not create:
        raise InvalidInput(
            f"there is no folder {team.address}", hint="check the name; --create makes it"
        )
    return merge_stores(user_store(), team)


@raise_typed
def pull(url: str) -> Transfer:
    """Copy a team's records to your own store; only new ones travel. Raises InvalidInput if there
    are none.

    Examples:
        >>> autotune.records.pull("s3://team/records").num_new
    """
    merged = merge_stores(team := Store(url), user_store())
    if not (merged.num_new or merged.num_present or merged.refused):
        raise InvalidInput(
            f"there are no records at {team.address}",
            hint="check the address; `push` fills a new store",
        )
    return merged


@raise_typed
def list_records(
    store: str | None = None, *, compare_here: bool = False
) -> tuple[RecordSummary, ...]:
    """The sound records of a store, newest first; with `compare_here`, whether each counts on this
    machine.

    Examples:
        >>> records = autotune.records.list_records()
        >>> [(record.device_name, record.step_seconds) for record in records]
    """
    here, rows = shareable_machine(read_machine()) if compare_here else None, []
    for file in _store(store).read():
        if (record := file.record) is None:
            continue
        row = RecordSummary(
            name=file.name,
            measured_on=record.measured_on.isoformat(),
            device_name=record.machine.device_name,
            family=record.workload.model.family,
            work=workload_class(record.workload),
            settings=label_of(record.settings),
            num_trials=len(record.trials),
            step_seconds=record.expected.step_seconds,
            peak_memory_bytes=record.expected.peak_memory_bytes,
        )
        if here:
            found = compare_machine(record, here)
            row = row.changed(match=found.kind, reasons=found.reasons)
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (row.measured_on, row.name), reverse=True))


@raise_typed
def prune(
    names: Sequence[str] = (), store: str | None = None, *, dry_run: bool = False
) -> tuple[str, ...]:
    """Delete the named records, or those that are superseded, damaged or impossible; return a line
    for each, with the reason.

    Examples:
        >>> autotune.records.prune(dry_run=True)
    """
    return prune_store(_store(store), names, dry_run=dry_run)


@raise_typed
def verify(store: str | None = None) -> tuple[int, tuple[str, ...]]:
    """Check that every record is whole, unaltered and possible: their number, and a line for each
    that is not. Raises InvalidInput if a store that is named has none.

    Examples:
        >>> count, bad = autotune.records.verify("s3://team/records")
    """
    opened = _store(store)
    problems = [file.problem for file in opened.read()]
    if store is not None and not problems:
        raise InvalidInput(f"there are no records at {opened.address}", hint="check the address")
    return len(problems), tuple(filter(None, problems))


def _store(url: str | None) -> Store:
    if url is None:
        return user_store()
    store = Store(url)
    if store.folder and not store.folder.exists():
        raise InvalidInput(f"there is no folder {store.address}", hint="check the name")
    return store
