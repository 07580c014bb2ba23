"""What a list shows of each record, cached by name: a name stands for its content, so the cache
never goes stale.

Whatever is wrong with the cache, it is made again from the records.
"""

import contextlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from autotune.runtime import cache_path, write_text_atomic
from autotune.schema import Frozen
from autotune.sharing.record import Record, workload_class
from autotune.sharing.store import Store


class RecordSummary(Frozen):
    """One record in a list.

    Example:
        >>> [(record.device_name, record.work, record.step_seconds) for record in autotune.list_records().records]
    """

    name: str
    measured_on: str
    device_name: str
    family: str
    work: str
    settings: str
    num_trials: int
    step_seconds: float
    peak_memory_bytes: int


_Index = TypeAdapter(dict[str, RecordSummary])


def summarize_records(store: Store) -> tuple[RecordSummary, ...]:
    """All valid records of a store, newest first."""
    path = cache_path("records-index.json")
    index = _read_index(path)
    entries = store.entries()
    unseen = [entry for entry in entries if entry.name not in index]
    fresh = {name: _summarize(name, record) for name, record in store.records(unseen)}
    if fresh:
        index |= fresh
        with contextlib.suppress(OSError):  # without the cache, records are opened again
            write_text_atomic(path, _Index.dump_json(index).decode())
    found = [index[entry.name] for entry in entries if entry.name in index]
    return tuple(sorted(found, key=lambda row: (row.measured_on, row.name), reverse=True))


def _read_index(path: Path) -> dict[str, RecordSummary]:
    try:
        return _Index.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return {}


def _summarize(name: str, record: Record) -> RecordSummary:
    return RecordSummary(
        name=name,
        measured_on=record.measured_on.isoformat(),
        device_name=record.machine.device_name,
        family=record.workload.model.family,
        work=workload_class(record.workload),
        settings=record.settings.label(),
        num_trials=len(record.trials),
        step_seconds=record.expected.step_seconds,
        peak_memory_bytes=record.expected.peak_memory_bytes,
    )
