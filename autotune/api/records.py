"""Shared records: what machines measured, kept in the user's own store and exchanged with teams.

A store is a folder, a git checkout, or an address such as `s3://bucket/path`; None stands for the
user's own.
"""

from collections.abc import Sequence
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.hardware import probe as read_machine
from autotune.runtime import shipped_path
from autotune.schema import Frozen
from autotune.sharing import (
    Record,
    RecordSummary,
    Store,
    Transfer,
    compare_machine,
    find_impossibilities,
    merge_stores,
    open_store,
    prune_store,
    summarize_records,
    user_store,
    verify_store,
)


class RecordVerdict(Frozen):
    """Whether a record counts on this machine, whatever was trained.

    Example:
        >>> autotune.list_records(compare_here=True).verdicts["b48725..."].reasons
    """

    match: str
    """`exact`, `upgraded`, `near`, `none`, or `impossible`."""
    reasons: tuple[str, ...]


class RecordList(Frozen):
    """The records of a store.

    Example:
        >>> found = autotune.list_records("s3://team/records")
        >>> len(found.records), found.num_damaged
    """

    records: tuple[RecordSummary, ...]
    verdicts: dict[str, RecordVerdict]
    """Verdicts by the record's name; empty unless asked for."""
    num_damaged: int
    """Number of files that are not valid records, and are left out."""


def shipped_profiles() -> Path:
    """The folder that ships with autotune: the catalog of GPUs, and a store of records that every
    search reads.

    Example:
        >>> autotune.verify_records(str(autotune.shipped_profiles()))
    """
    return shipped_path()


class NoSuchFolder(InvalidInput):
    """A folder to push records to does not exist: it may be a slip of the pen.

    Example:
        >>> try:
        ...     autotune.push_records("/team/records")
        ... except autotune.NoSuchFolder:
        ...     autotune.push_records("/team/records", create=True)
    """


def push_records(url: str, *, create: bool = False) -> Transfer:
    """Copy your records to a team's store; only new ones travel.

    Args:
        url: a folder, a git checkout or an address such as `s3://bucket/path`.
        create: make the folder if it does not exist.

    Raises:
        NoSuchFolder: there is no such folder, and `create` was not asked for.

    Example:
        >>> autotune.push_records("s3://team/records").num_new
    """
    team = open_store(url)
    if team.is_missing_folder and not create:
        raise NoSuchFolder(
            f"there is no folder {team.address}", hint="check the name; --create makes it"
        )
    return merge_stores(user_store(), team)


def pull_records(url: str) -> Transfer:
    """Copy a team's records to your own store; only new ones travel.

    Raises:
        InvalidInput: there are no records at the address.

    Example:
        >>> autotune.pull_records("s3://team/records").num_new
    """
    merged = merge_stores(team := open_store(url), user_store())
    if not (merged.num_new or merged.num_present or merged.refused):
        raise InvalidInput(
            f"there are no records at {team.address}",
            hint="check the address; `push` fills a new store",
        )
    return merged


def list_records(store: str | None = None, *, compare_here: bool = False) -> RecordList:
    """The sound records of a store, newest first; with `compare_here`, whether each counts on this
    machine.

    Example:
        >>> [(record.device_name, record.step_seconds) for record in autotune.list_records().records]
    """
    chosen = _store(store)
    found = summarize_records(chosen)
    verdicts = _verdicts(chosen) if compare_here else {}
    return RecordList(
        records=found, verdicts=verdicts, num_damaged=len(chosen.sizes()) - len(found)
    )


def find_record(name: str, store: str | None = None) -> tuple[str, Record]:
    """The record whose name begins so, and its whole name.

    Raises:
        InvalidInput: no record, or several, have such a name.

    Example:
        >>> name, record = autotune.find_record("b48725")
        >>> record.settings
    """
    file, record = _store(store).find(name)
    return file.name, record


def prune_records(
    names: Sequence[str] = (),
    store: str | None = None,
    *,
    older_than_days: int | None = None,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Delete the named records, or those that are superseded, damaged, impossible or of an older
    trial protocol.

    Returns:
        one line for each record, with the reason.

    Example:
        >>> autotune.prune_records(older_than_days=180, dry_run=True)
    """
    return tuple(
        prune_store(_store(store), names, older_than_days=older_than_days, dry_run=dry_run)
    )


def verify_records(store: str | None = None) -> tuple[int, tuple[str, ...]]:
    """Check that every record is whole, unaltered and possible: their number, and a line for each
    that is not.

    Example:
        >>> count, bad = autotune.verify_records("s3://team/records")
    """
    return verify_store(_store(store))


def _store(url: str | None) -> Store:
    return user_store() if url is None else open_store(url)


def _verdicts(store: Store) -> dict[str, RecordVerdict]:
    hardware = read_machine()
    verdicts = {}
    for name, record in store.records():
        matched, impossible = compare_machine(record, hardware), find_impossibilities(record)
        kind = "impossible" if impossible else matched.kind
        verdicts[name] = RecordVerdict(match=kind, reasons=tuple(impossible or matched.reasons))
    return verdicts
