"""A search as a file, to plan from again without the machine: `autotune plan --record FILE`, later
`--replay FILE`.

JSON lines. The first holds the versions and the hardware; each other one a record of another search
that was at hand, or a trial. Planning from it is a pure function: its trials are taken in their
order, not chosen anew, so that the same file and request give the same plan, byte for byte, on any
machine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidInput
from autotune.runtime import read_bounded, write_text_atomic
from autotune.schema import (
    SCHEMA_VERSION,
    HardwareProfile,
    MemoryBudget,
    TrainingPlan,
    TrialResult,
    Workload,
    migrate,
)
from autotune.sharing import MatchedRecord, Record, StoreMatches, compare, usable_trials

if TYPE_CHECKING:
    from autotune.planning.backend import PlannerBackend

MAX_RECORDING_BYTES = 64 << 20


@dataclass(frozen=True)
class Recording:
    """All that a search met."""

    autotune_version: str
    hardware: HardwareProfile
    records: tuple[tuple[str, Record], ...]
    """Records of other searches, with their names."""
    trials: tuple[TrialResult, ...]
    memory_budget: MemoryBudget | None = None
    """What a run might use of the device; None for what the device left."""


def recording_of(
    plan: TrainingPlan,
    hardware: HardwareProfile,
    known: Sequence[MatchedRecord],
    *,
    memory_budget: MemoryBudget | None = None,
) -> Recording:
    """What it takes to make `plan` again, of what was `known` then."""
    records = tuple((item.name, item.record) for item in known if item.name in plan.frozen.records)
    return Recording(
        plan.frozen.autotune_version, hardware, records, plan.frozen.trials, memory_budget
    )


def write_recording(path: Path, recording: Recording) -> None:
    """Write it whole or not at all."""
    head = {
        "schema_version": SCHEMA_VERSION,
        "autotune_version": recording.autotune_version,
        "hardware": recording.hardware.model_dump(mode="json", exclude_defaults=True),
    }
    if recording.memory_budget is not None:
        head["memory_budget"] = recording.memory_budget.model_dump(mode="json")
    records = (
        {"name": name, "record": record.model_dump(mode="json")}
        for name, record in recording.records
    )
    trials = (
        {"trial": trial.model_dump(mode="json", exclude_defaults=True)}
        for trial in recording.trials
    )
    write_text_atomic(path, "".join(f"{json.dumps(line)}\n" for line in (head, *records, *trials)))


def read_recording(path: Path) -> Recording:
    """The recording in a file.

    Raises:
        InvalidInput: it cannot be read, is not a recording, or is one of a newer autotune.
    """
    hint = "recordings are written by `autotune plan --record FILE`"
    try:
        content = read_bounded(path, MAX_RECORDING_BYTES)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint=hint) from error
    try:
        return _parse_recording(content)
    except InvalidInput as error:
        raise InvalidInput(f"{path} {error.message}", hint=error.hint) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is not a recording of this version of autotune, or damaged", hint=hint
        ) from error


def _parse_recording(content: bytes) -> Recording:
    lines = [json.loads(line) for line in content.splitlines()]
    head, *lines = migrate(lines, lines[0].get("schema_version", 1))
    return Recording(
        autotune_version=str(head["autotune_version"]),
        hardware=_parsed(HardwareProfile, head["hardware"]),
        records=tuple(
            (str(line["name"]), _parsed(Record, line["record"]))
            for line in lines
            if "record" in line
        ),
        trials=tuple(_parsed(TrialResult, line["trial"]) for line in lines if "record" not in line),
        memory_budget=_parsed(MemoryBudget, head["memory_budget"])
        if "memory_budget" in head
        else None,
    )


def _parsed(kind: Any, data: object) -> Any:
    return kind.model_validate_json(json.dumps(data))


def replayed(recording: Recording) -> "PlannerBackend":
    """PlannerBackend in which everything is as it was then; it starts no trial."""
    from autotune.planning.backend import (
        PlannerBackend,
    )  # whose trials take torch, which reading a file does not

    def find_matches(
        hardware: HardwareProfile, workload: Workload, budget_bytes: int
    ) -> StoreMatches:
        return StoreMatches(
            records=tuple(
                MatchedRecord(
                    name,
                    record,
                    compare(record, hardware, workload, budget_bytes),
                    usable_trials(record, hardware, budget_bytes),
                )
                for name, record in recording.records
            ),
            stale=(),
            refused=(),
        )

    return PlannerBackend(
        find_matches=find_matches,
        autotune_version=recording.autotune_version,
        needs_weights=False,
        check_parity=lambda context, choices, model: context.hardware,
        recorded_trials=recording.trials,
    )
