"""Shared records: what machines measured, kept in the user's own store and exchanged with teams.

A store is a folder, a git checkout, or an address such as `s3://bucket/path`; None stands for the
user's own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.errors import InvalidInput, raise_typed
from autotune.machine.probe import probe as read_machine
from autotune.plan import base, words
from autotune.report.text import memory_text, seconds_text
from autotune.share.store import Record, Store, shareable_machine, user_store, workload_class
from autotune.share.warm_start import compare_machine
from autotune.system.files import write_text_atomic

SAME_SECONDS = 0.05  # relative difference of steps that is noise


class Transfer(base.Frozen):
    """Result of a push or a pull."""

    num_new: int
    num_present: int
    refused: tuple[str, ...]
    """Why records were refused, one sentence each, with its name."""
    target: str  # where the records went


class RecordSummary(base.Frozen):
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
def push(url: str) -> Transfer:
    """Copy your records to a team's store; only new ones travel. Makes a missing folder, but
    not its parent: then it raises InvalidInput.

    Examples:
        >>> autotune.records.push("s3://team/records").num_new
    """
    team = Store(url)
    if team.folder and not team.folder.parent.exists():
        hint = "check the name, or make that folder first"
        raise InvalidInput(f"there is no folder {team.folder.parent}", hint=hint)
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
        what = f"there are no records at {team.address}"
        raise InvalidInput(what, hint="check the address; `push` fills a new store")
    return merged


@raise_typed
def list_records(
    store: str | None = None, *, compare_here: bool = False
) -> tuple[RecordSummary, ...]:
    """List a store's valid records, newest first; with `compare_here`, whether each counts on
    this machine.

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
            settings=words.label_of(dict(record.settings)),
            num_trials=len(record.trials),
            step_seconds=record.expected.step_seconds,
            peak_memory_bytes=record.expected.peak_memory_bytes,
        )
        if here:
            found = compare_machine(record, here)
            row = row.changed(match=found.kind, reasons=found.reasons)
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (row.measured_on, row.name), reverse=True))


class Submission(base.Frozen):
    """A record for everybody's use, and the text of the pull request that brings it."""

    key: str
    """Its place in the project's repository."""
    record: str
    """The record as JSON; nothing else travels."""
    pull_request: str


@raise_typed
def submit(name: str = "", path: str | Path | None = None) -> Submission:
    """Prepare a record of your own for the project: the one whose name begins so, or the newest.

    With `path`, a checkout of the project, the record is written there, and `pull-request.md`
    next to it. Raises InvalidInput if there is no such record, or more than one.

    Examples:
        >>> print(autotune.records.submit().record)
    """
    store = user_store()
    files = store.read([_key_named(store, name)] if name else None)
    sound = [(record, file) for file in files if (record := file.record)]
    if not sound:
        raise InvalidInput("there are no records yet", hint="`autotune plan` makes them")
    record, file = max(sound, key=lambda pair: (pair[0].measured_on, pair[1].name))
    promised = record.expected
    rows = (
        f"| {words.label_of(dict(trial.candidate))} | {trial.outcome} "
        f"| {memory_text(trial.peak_memory_bytes)} | {seconds_text(trial.median_step_seconds)} |\n"
        for trial in record.trials
    )
    text = f"""Record: {record.workload.model.family} on {record.machine.device_name}

Measured on {record.measured_on} by autotune {record.autotune_version}:
{workload_class(record.workload)}, {seconds_text(promised.step_seconds)} a step,
{memory_text(promised.peak_memory_bytes)} of memory in a step.

| trial | outcome | memory | a step |
|---|---|---|---|
{"".join(rows)}"""
    made = Submission(
        key=f"profiles/records/{file.key}", record=file.content.decode(), pull_request=text
    )
    if path is not None:
        Store(str(Path(path) / "profiles" / "records")).write(file.key, file.content)
        write_text_atomic(Path(path) / "pull-request.md", text)
    return made


@raise_typed
def prune(
    names: Sequence[str] = (), store: str | Store | None = None, *, dry_run: bool = False
) -> tuple[str, ...]:
    """Delete the named records, or those that are superseded, damaged or impossible; return a line
    for each, with the reason. Names may be shortened. Raises InvalidInput, with nothing deleted, if
    one fits no record or several.

    Examples:
        >>> autotune.records.prune(dry_run=True)
    """
    opened, useless, parts = _store(store), dict[str, str](), list[Path]()
    for name in names:
        key = _key_named(opened, name)
        useless[key] = f"{Path(key).stem[:12]} was named"
    if not names:
        useless, parts = dict(_find_useless(opened)), opened.find_abandoned_parts()
    for key in () if dry_run else useless:
        opened.delete(key)
    for part in () if dry_run else parts:
        part.unlink(missing_ok=True)
    return (*useless.values(), *(f"{part.name} was left by a push that died" for part in parts))


@raise_typed
def verify(store: str | None = None) -> tuple[int, tuple[str, ...]]:
    """Check that every record is whole, unaltered and possible; return their number, and a line
    for each that is not. Raises InvalidInput if a store that is named has none.

    Examples:
        >>> count, bad = autotune.records.verify("s3://team/records")
    """
    opened = _store(store)
    problems = [file.problem for file in opened.read()]
    if store is not None and not problems:
        raise InvalidInput(f"there are no records at {opened.address}", hint="check the address")
    return len(problems), tuple(filter(None, problems))


def _store(url: str | Store | None) -> Store:
    if url is None or isinstance(url, Store):
        return url or user_store()
    store = Store(url)
    if store.folder and not store.folder.exists():
        raise InvalidInput(f"there is no folder {store.address}", hint="check the name")
    return store


def merge_stores(source: Store, target: Store) -> Transfer:
    """Copy, byte for byte, the valid records that only `source` has; nothing else is read."""
    there, sizes = target.sizes(), source.sizes()
    wanted = [key for key, size in sizes.items() if there.get(key) != size]  # or it is cut off
    num_new, refused = 0, []
    for file in source.read(wanted):
        if file.record is None:
            refused.append(file.problem)
        else:
            target.write(file.key, file.content)
            num_new += 1
    return Transfer(
        num_new=num_new,
        num_present=len(sizes) - len(wanted),
        refused=tuple(refused),
        target=target.address,
    )


def _key_named(store: Store, name: str) -> str:
    keys = [key for key in store.sizes() if Path(key).stem.startswith(name.lower())]
    if len(name) < 4 or len(keys) != 1:
        what = f"{len(keys) or 'no'} records begin with {name!r} in {store.address}"
        hint = "`autotune profiles list` shows their names; give at least 4 digits"
        raise InvalidInput(what, hint=hint)
    return keys[0]


def _find_useless(store: Store) -> Iterator[tuple[str, str]]:
    sound = []
    for file in store.read():
        if file.record:
            sound.append((file.record, file))
        else:
            yield file.key, file.problem
    sound.sort(key=lambda pair: (pair[0].measured_on, len(pair[0].trials)), reverse=True)
    # A newer record of the same machine, versions and work supersedes one of no more trials, none
    # of which is faster: its date alone says nothing.
    kept: dict[tuple[object, ...], list[Record]] = {}
    for record, file in sound:
        machine = record.machine
        versions = machine.versions.changed(python="", driver=None)
        size = machine.total_memory_bytes
        about = (machine.device_name, size, versions, record.workload)
        best = (1 + SAME_SECONDS) * _best_seconds(record)
        newer = (
            other
            for other in kept.setdefault(about, [])
            if len(record.trials) <= len(other.trials) and _best_seconds(other) <= best
        )
        if found := next(newer, None):
            yield file.key, f"{file.name[:12]} is superseded by {found.name[:12]}"
        else:
            kept[about].append(record)


def _best_seconds(record: Record) -> float:
    ran = (trial for trial in record.trials if trial.outcome == "ok")
    return min(trial.median_step_seconds or 0.0 for trial in ran)
