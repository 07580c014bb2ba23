"""A search as a file, to plan from again without the machine: `autotune plan --record FILE`, later `--replay FILE`.

JSON lines. The first holds the versions and the hardware; each other one a record of another search that was at hand,
or a trial. Planning from it is a pure function: the same file and request give the same plan, byte for byte.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cost import CostModel
from autotune.errors import InvalidInput
from autotune.planning.backend import PlannerBackend
from autotune.runtime import write_text_atomic
from autotune.schema import (
    SCHEMA_VERSION,
    Candidate,
    HardwareProfile,
    MemoryBudget,
    TrainingPlan,
    TrialResult,
    Workload,
    migrate,
)
from autotune.search import TrialFunction
from autotune.sharing import MatchedRecord, Record, StoreMatches, compare, usable_trials

MAX_RECORDING_BYTES = 64 << 20


@dataclass(frozen=True)
class Recording:
    """All that a search met."""

    autotune_version: str
    hardware: HardwareProfile
    records: tuple[tuple[str, Record], ...]
    """Of other searches, with their names."""
    trials: tuple[TrialResult, ...]
    shared: bool = False
    """Whether several workers may have searched: what each tried went by what the others were at, which is gone."""
    memory_budget: MemoryBudget | None = None
    """What a run might use of the device; None for what the device left."""


def recording_of(
    plan: TrainingPlan,
    hardware: HardwareProfile,
    known: Sequence[MatchedRecord],
    *,
    shared: bool = False,
    memory_budget: MemoryBudget | None = None,
) -> Recording:
    """What it takes to make `plan` again, of what was `known` then."""
    records = tuple((item.name, item.record) for item in known if item.name in plan.frozen.records)
    return Recording(plan.frozen.autotune_version, hardware, records, plan.frozen.trials, shared, memory_budget)


def write_recording(path: Path, recording: Recording) -> None:
    """Write it whole or not at all."""
    head = {
        "schema_version": SCHEMA_VERSION,
        **({"shared": True} if recording.shared else {}),
        "autotune_version": recording.autotune_version,
        "hardware": recording.hardware.model_dump(mode="json", exclude_defaults=True),
    }
    if recording.memory_budget is not None:
        head["memory_budget"] = recording.memory_budget.model_dump(mode="json")
    records = ({"name": name, "record": record.model_dump(mode="json")} for name, record in recording.records)
    trials = ({"trial": trial.model_dump(mode="json", exclude_defaults=True)} for trial in recording.trials)
    write_text_atomic(path, "".join(f"{json.dumps(line)}\n" for line in (head, *records, *trials)))


def read_recording(path: Path) -> Recording:
    """The recording in a file.

    Raises:
        InvalidInput: it cannot be read, is not a recording, or is one of a newer autotune.
    """
    hint = "recordings are written by `autotune plan --record FILE`"
    try:
        if path.stat().st_size > MAX_RECORDING_BYTES:
            raise InvalidInput(f"{path} is too large for a recording", hint=hint)
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint=hint) from error
    try:
        return _parse_recording(content)
    except InvalidInput as error:
        raise InvalidInput(f"{path} {error.message}", hint=error.hint) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{path} is not a recording of this version of autotune, or damaged", hint=hint) from error


def _parse_recording(content: bytes) -> Recording:
    lines = [json.loads(line) for line in content.splitlines()]
    head, *lines = migrate(lines, lines[0].get("schema_version", 1))
    return Recording(
        autotune_version=str(head["autotune_version"]),
        hardware=_parsed(HardwareProfile, head["hardware"]),
        records=tuple((str(line["name"]), _parsed(Record, line["record"])) for line in lines if "record" in line),
        trials=tuple(_parsed(TrialResult, line["trial"]) for line in lines if "record" not in line),
        shared=head.get("shared") is True,
        memory_budget=_parsed(MemoryBudget, head["memory_budget"]) if "memory_budget" in head else None,
    )


def _parsed(kind: Any, data: object) -> Any:
    return kind.model_validate_json(json.dumps(data))


def replayed(recording: Recording) -> PlannerBackend:
    """PlannerBackend in which everything goes as it went then."""
    results = {trial.candidate: trial for trial in recording.trials if not trial.confirms}
    confirmed = {trial.candidate: trial for trial in recording.trials if trial.confirms}

    def run(candidate: Candidate) -> TrialResult:
        if candidate not in results:
            raise InvalidInput(
                f"the recording has no trial of {candidate.label()}, which this search asks for",
                hint="ask the question that was recorded with the same version, or record again: --record FILE",
            )
        return results[candidate]

    @contextmanager
    def trials(model: str, cost: CostModel) -> Iterator[TrialFunction]:
        yield run

    def find_matches(hardware: HardwareProfile, workload: Workload, budget_bytes: int) -> StoreMatches:
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
        trials,
        find_matches,
        recording.autotune_version,
        needs_weights=False,
        check_parity=lambda context, choices, model: context.hardware,
        rehearse=lambda model, cost, candidate, max_seconds: confirmed.get(candidate),
        recorded_trials=tuple(results.values()) if recording.shared else None,
    )
