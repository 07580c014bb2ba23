"""What leaves a machine: one search's measurements, cleaned of everything that tells who or where.

A record is named by the SHA-256 of its canonical JSON, so an altered one no longer fits its name. What goes in is
listed field by field here: free text (messages, notes, reasons), paths, names of data and of local folders stay out.
"""

import hashlib
import json
import re
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from autotune.backends import WEIGHT_FORMATS
from autotune.errors import InvalidInput
from autotune.runtime import __version__
from autotune.schema import (
    Bucket,
    Candidate,
    Expected,
    Frozen,
    FrozenPart,
    HardwareProfile,
    ModelSpec,
    NaturalInt,
    PositiveInt,
    Rate,
    Residual,
    TrainingPlan,
    TrialResult,
    Versions,
    Workload,
    digest_of,
)

MAX_RECORD_BYTES = 1 << 18
"""A record of 8 trials has about 4 KiB."""
MAX_TRIALS = 512
MAX_TEXT = 160
LEAST_TRIALS = 3
"""Of a search whose winner answers the question for others: fewer have compared next to nothing."""
OF_PROMISE = "evidence step_seconds peak_memory_bytes process_memory_bytes"
"""What the rest of a job takes, and what its machine costs, is nobody else's business."""
OF_TRIAL = (
    "candidate outcome step_seconds warmup_seconds load_seconds peak_memory_bytes allocator_retries confirms"
    " load_peak_memory_bytes host_memory_bytes wall_seconds"
)
"""The message may hold a path, and the loss tells about the data. A record that has them is not one of ours."""
UNTOLD = tuple(
    (name, field.default) for name, field in TrialResult.model_fields.items() if name not in OF_TRIAL.split()
)
"""Fields of a trial that no record fills, and what they hold then."""
DIGITS, EXPONENT = re.compile(r"\d{22}"), re.compile(r"[eE]\+?\d{3}")
"""Of numbers that arithmetic might choke on: 10^21 and more as an integer, 10^100 and more as a float."""


class DamagedRecord(InvalidInput):
    """A file of a store is no record: altered, cut off, too large, or nothing that autotune writes."""


class ForeignRecord(DamagedRecord):
    """A whole record of another autotune, which this one cannot read: others may."""


class Machine(Frozen):
    """A machine as far as its measurements depend on it. Never its name, its user, its paths or its serial numbers."""

    match_keys: dict[str, str | None] = Field(min_length=1, max_length=32)
    """Those that decide for every trial; libraries decide only for the trials that used them."""
    device_name: str
    total_memory_bytes: int | None
    budget_bytes: int = NaturalInt
    logical_cores: int = PositiveInt
    power_limit_watts: float | None
    versions: Versions
    rates: tuple[Rate, ...] = Field(max_length=256)
    noisy: bool


class Record(Frozen):
    """One search on one machine: every trial, those that failed too, and the settings that won."""

    schema_version: Literal[1]
    autotune_version: str
    measured_on: date
    """In UTC."""
    machine: Machine
    workload: Workload
    """Only the largest bucket, which is what trials run: the others would tell about the data."""
    settings: Candidate
    expected: Expected
    trials: tuple[TrialResult, ...] = Field(min_length=1, max_length=MAX_TRIALS)
    search_seconds: float = Field(ge=0)
    calibration: tuple[Residual | None, ...] = Field(default=(), max_length=MAX_TRIALS)
    """For each trial, how far it was from the cost model of this version; None for those that did not run."""
    conclusive: bool = True
    """Whether the settings answer the question: False where the search was cut short."""
    narrowed: tuple[str, ...] = Field(default=(), max_length=32)
    """Knobs that were pinned, or values of which were excluded: there the answer is for those who do likewise."""

    @model_validator(mode="after")
    def _is_evidence(self) -> "Record":
        if self.expected.evidence != "measured":
            raise ValueError("predictions are no evidence")
        if any(trial.memory_cap_bytes is not None for trial in self.trials):
            raise ValueError("trials under a cap on memory are no evidence")
        if any(getattr(trial, name) != silence for trial in self.trials for name, silence in UNTOLD):
            raise ValueError("its trials say more than a record does")
        if self.settings not in [trial.candidate for trial in self.trials if trial.outcome == "ok"]:
            raise ValueError("none of its trials ran the settings that it recommends")
        if self.calibration and len(self.calibration) != len(self.trials):
            raise ValueError("its calibration is not that of its trials")
        return self

    @property
    def content(self) -> bytes:
        """The canonical JSON: sorted keys, no spaces, no line ends that a tool could convert."""
        return canonical(self.model_dump(mode="json"))

    @property
    def name(self) -> str:
        """The 64 hex digits that the record is filed under."""
        return name_of(self.content)

    @property
    def day(self) -> date:
        """`measured_on`; long ago where that is yet to come: of like records the newest leads, and no clock that runs
        ahead, nor a lie, makes one lead for good. A day is what clocks may differ by."""
        return self.measured_on if self.measured_on <= datetime.now(UTC).date() + timedelta(days=1) else date.min

    @property
    def folder(self) -> str:
        """Where in a store it belongs: hard keys / architecture / class of work."""
        return f"{machine_folder(self.machine)}/{architecture_folder(self.workload)}/{class_of(self.workload)}"


def canonical(data: dict[str, Any]) -> bytes:
    """The one JSON form that is hashed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def name_of(content: bytes) -> str:
    """SHA-256 of a record's bytes as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def parse_record(content: bytes, name: str) -> Record:
    """The record in `content`, if it is whole, unaltered and valid.

    Raises:
        DamagedRecord: it is not.
    """
    if len(content) > MAX_RECORD_BYTES:
        raise _damaged(name, "is too large for a record")
    if name_of(content) != name:
        raise _damaged(name, "was altered or cut off: its content does not match its name")
    other = "is no record of this version of autotune"
    try:
        if harm := _harm_in(content.decode()):
            raise _damaged(name, f"{other}: {harm}")
        return Record.model_validate_json(content)
    except UnicodeDecodeError as error:
        raise _damaged(name, f"{other}: it is no text") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:80] or "the whole"
        if writer := _other_writer(content):
            what = f"{name[:12]} was written by autotune {writer}, and this is {__version__}: {where} is not as here"
            raise ForeignRecord(what, hint="update autotune") from error
        raise _damaged(name, f"{other}: {where}: {first['msg'].lower()}") from error


def _other_writer(content: bytes) -> str | None:
    """The version of autotune that these bytes are of, if they are a record of another one."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    version = data.get("autotune_version") if isinstance(data, dict) and "schema_version" in data else None
    return version if isinstance(version, str) and version != __version__ else None


def _damaged(name: str, why: str) -> DamagedRecord:
    hint = "`autotune profiles verify` lists such files; delete them, the others are not touched by it"
    return DamagedRecord(f"{name[:12]} {why}", hint=hint)


def _harm_in(text: str) -> str | None:
    """What in a record's JSON could hurt a terminal or a calculation, found before it is parsed.

    No text of ours needs an escape, so that a backslash is refused and every second part between quotes is a text.
    """
    parts = text.split('"')
    if "\\" in text or not text.isprintable() or max(map(len, parts[1::2]), default=0) > MAX_TEXT:
        return "a text in it is too long or not printable"
    rest = " ".join(parts[::2])
    long = [item for item in rest.split(",") if len(item) > 21]  # few: it saves most of the search
    if EXPONENT.search(rest) or any(map(DIGITS.search, long)):
        return "a number in it is too large"
    return None


def record_of(plan: TrainingPlan, hardware: HardwareProfile, calibration: tuple[Residual | None, ...] = ()) -> Record:
    """What may leave this machine of a plan that was just measured on it, with what it taught the cost model.

    `plan.frozen.trials` must be trials of this machine alone: what a record taught is not measured again by citing it.

    Raises:
        InvalidInput: it is no evidence: predicted, of another machine, or measured under a cap on memory.
    """
    frozen = plan.frozen
    hint = "make one with `autotune plan` on this machine"
    if why := why_no_evidence(plan, hardware):
        raise InvalidInput(f"this plan cannot be shared: {why}", hint=hint)
    if len(frozen.trials) > MAX_TRIALS:
        raise InvalidInput(f"this plan cannot be shared: it has over {MAX_TRIALS} trials", hint=hint)
    work = frozen.workload.share(frozen.hardware.num_processes)  # what its trials ran
    images = work.effective_batch_size / frozen.expected.step_seconds
    record = Record(
        schema_version=1,
        autotune_version=frozen.autotune_version,
        measured_on=datetime.now(UTC).date(),
        machine=machine_of(hardware),
        workload=_without_names(work),
        settings=frozen.settings,
        expected=Expected(images_per_second=images, **_only(frozen.expected, OF_PROMISE)),
        trials=tuple(map(shared_part, frozen.trials)),
        search_seconds=frozen.search_seconds,
        calibration=calibration,
        conclusive=_is_conclusive(frozen),
        narrowed=tuple(name for name in Candidate.model_fields if name in dict((*frozen.pins, *frozen.exclusions))),
    )
    return parse_record(record.content, record.name)  # what is written here can be read elsewhere


def _is_conclusive(frozen: FrozenPart) -> bool:
    """Whether enough was tried, or a record that had found enough was verified.

    A plan that stands on a record whose promise held has no longer trial of its winner: the promise confirmed it.
    """
    num_tried = sum(not trial.confirms for trial in frozen.trials)
    verified = bool(frozen.records) and num_tried == len(frozen.trials)
    return verified or num_tried >= LEAST_TRIALS


def shared_part(trial: TrialResult) -> TrialResult:
    """The trial without what tells of the data, or in words."""
    return TrialResult(**_only(trial, OF_TRIAL))


def machine_of(hardware: HardwareProfile) -> Machine:
    """The part of a profile that is shared and compared."""
    device, libraries = hardware.device, {each.needs.library for each in WEIGHT_FORMATS.values()}
    return Machine(
        match_keys={key: _public(value) for key, value in hardware.match_keys.items() if key not in libraries},
        device_name=device.name,
        total_memory_bytes=device.total_memory_bytes,
        budget_bytes=device.budget_bytes,
        logical_cores=hardware.host.logical_cores,
        power_limit_watts=device.power_limit_watts,
        versions=Versions.model_validate({key: _public(value) for key, value in hardware.versions}),
        rates=tuple(rate.model_copy(update={"conditions": None}) for rate in hardware.rates),
        noisy=hardware.noisy,
    )


def machine_folder(machine: Machine) -> str:
    """Folder of all machines with these hard keys."""
    return _short_digest(tuple(sorted(machine.match_keys.items())))


def architecture_folder(workload: Workload) -> str:
    """Folder of all work on this architecture: its family's name for people, its digest for certainty."""
    model = workload.model
    return f"{_slug(model.family)}-{_short_digest((('architecture', model.architecture),))}"


def class_of(workload: Workload) -> str:
    """Folder of all work of this kind: what differs within it (caption length, aspect ratio) changes little."""
    frames = workload.largest_bucket.num_frames
    parts = f"{workload.resolution_px}px-{frames}f-r{workload.rank}-{_slug(workload.targets)}"
    return f"{parts}-b{workload.effective_batch_size}-{workload.text_padding}"


def why_no_evidence(plan: TrainingPlan, hardware: HardwareProfile) -> str | None:
    """Why what the plan holds tells nothing about machines like this one; None when it does."""
    planned = plan.frozen.hardware
    if plan.frozen.expected.evidence != "measured" or hardware.origin != "probe":
        return "it was predicted, not measured"
    if planned.fingerprint != hardware.fingerprint or planned.device_name != hardware.device.name:
        return "it was made on another machine or with other versions than these"
    if any(trial.memory_cap_bytes is not None for trial in plan.frozen.trials):
        return "it was measured under a cap on memory"
    return None


def _without_names(workload: Workload) -> Workload:
    """The same work without the folder's name and without the shape of the data beyond its largest bucket."""
    from autotune.families import FAMILIES

    model, largest = workload.model, workload.largest_bucket
    family = FAMILIES.get(model.family)
    spec = ModelSpec.model_validate({**dict(model), "name": family.hub_id if family else model.family})
    return Workload.model_validate(
        {**dict(workload), "model": spec, "buckets": (Bucket.model_validate({**dict(largest), "num_items": 1}),)}
    )


def _only(thing: Frozen, names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names.split()}


def _public(version: str | None) -> str | None:
    """A version without its local part, which a builder may have named after a host or a person."""
    return None if version is None else version.split("+")[0]


@lru_cache(maxsize=1024)
def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "other"


@lru_cache(maxsize=1024)
def _short_digest(pairs: tuple[tuple[str, str | None], ...]) -> str:
    return digest_of(dict(pairs)).removeprefix("sha256:")[:16]
