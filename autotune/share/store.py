"""Records of what searches measured, and the stores that hold them.

A record leaves a machine without who or where: free text (messages, notes, reasons), paths, names
of data and of local folders stay out. Stores are folders of this machine (git checkouts, too) or
whatever fsspec can reach, with one file per record, `<architecture>/<sha256 of the content>.json`.
Two stores merge by union. A record is taken only if it is whole, unaltered, valid, in its folder
and possible.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, ValidationError, model_validator

from autotune.errors import AutotuneError, InvalidInput
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.models.registry import FAMILIES
from autotune.plan.base import SCHEMA_VERSION, Frozen, NaturalInt, PositiveInt, first_problem
from autotune.plan.candidate import Candidate, Residual, TrialResult
from autotune.plan.hardware import HardwareProfile, Rate, Versions
from autotune.plan.plan import Expected, TrainingPlan
from autotune.plan.workload import Workload
from autotune.system import files

MAX_RECORD_BYTES = 1 << 20  # one of 8 trials has about 4 KiB, of `MAX_TRIALS` some 400
MAX_TRIALS = 512
MAX_TEXT_LENGTH = 160
MIN_CONCLUSIVE_TRIALS = 3  # of fewer trials the winner is no answer for others
EXPECTED_FIELDS = ("evidence", "step_seconds", "peak_memory_bytes", "process_memory_bytes")
"""Expectations that are shared: a job's hours and a machine's costs stay private."""
ABSURD_NUMBER = re.compile(r"\d{22}|[eE][+-]?(?:\d{3}|[3-9]\d)")
"""A number that measures nothing and that arithmetic might choke on."""
SPILL_RATIO = 1.02  # peak over total memory: above it the step would have spilled
MAX_FLOPS, MAX_FLOPS_PER_CORE = 2e16, 1e13  # operations per second of any GPU; of a core of any CPU
FASTER_THAN_PROBED = 4.0  # products in a step than the fastest that the probe has measured


class DamagedRecord(InvalidInput):
    """A file of a store is not a record: altered, cut off, too large, or of another version."""


class Machine(Frozen):
    """A machine as far as its measurements depend on it."""

    match_keys: dict[str, str | None] = Field(max_length=32)
    """Without libraries, which decide only for the trials that used them."""
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

    schema_version: Literal[2]
    autotune_version: str
    measured_on: date  # in UTC
    machine: Machine
    workload: Workload
    """Its only bucket is the largest: the others would tell about the data."""
    settings: Candidate
    expected: Expected
    trials: tuple[TrialResult, ...] = Field(min_length=1, max_length=MAX_TRIALS)
    search_seconds: float = Field(ge=0)
    calibration: tuple[Residual | None, ...] = Field(default=(), max_length=MAX_TRIALS)
    """For each trial that ran, how far it was from the cost model of this version."""
    conclusive: bool
    """False if the search was cut short, or restricted by pins or exclusions."""

    @model_validator(mode="after")
    def _is_evidence(self) -> "Record":
        if self.expected.evidence != "measured":
            raise ValueError("predictions are no evidence")
        if any(trial != shareable_trial(trial) for trial in self.trials):  # capped ones, too
            raise ValueError("its trials contain more than a record may")
        ran = (trial for trial in self.trials if trial.outcome == "ok")
        if not any(trial.candidate == self.settings for trial in ran):
            raise ValueError("none of its trials ran the settings that it recommends")
        if self.calibration and len(self.calibration) != len(self.trials):
            raise ValueError("its calibration is not that of its trials")
        return self

    @property
    def content(self) -> bytes:
        """The canonical JSON: sorted keys, no spaces, no line ends that a tool could convert."""
        data = self.model_dump(mode="json")
        return json.dumps(
            data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()

    @property
    def name(self) -> str:
        """Name of a record that was made here; one that was read goes by the name of its file."""
        return name_of(self.content)

    @property
    def key(self) -> str:
        return f"{record_folder(self.workload)}/{self.name}.json"


def name_of(content: bytes) -> str:
    """Hash a record's bytes to 64 hex digits (SHA-256)."""
    return hashlib.sha256(content).hexdigest()


def parse_record(content: bytes, key: str) -> Record:
    """Parse a record. Raises DamagedRecord unless it is valid, and belongs where `key` says."""
    folder, _, name = key.removesuffix(".json").rpartition("/")
    try:
        if len(content) > MAX_RECORD_BYTES:
            raise ValueError("is too large for a record")
        if name_of(content) != name:
            raise ValueError("was altered or cut off: its content does not match its name")
        _require_harmless(content.decode())
        record = Record.model_validate_json(content)
        if folder != record_folder(record.workload):
            raise ValueError("is in a folder where it does not belong")
        if reason := _find_impossibility(record):
            raise ValueError(f"cannot be true: {reason}")
    except ValidationError as error:
        (field, wrong), version = first_problem(error), error.errors()[0]["input"]
        where = f"{field[:80] or 'the whole'}: {wrong}"
        why = f"is not a record of this version of autotune: {where}"
        if field == "schema_version" and type(version) is int:
            why = f"has schema {version}, and this autotune reads schema {SCHEMA_VERSION} only"
    except ValueError as error:
        why = str(error)
    else:
        return record
    raise DamagedRecord(f"{name[:12]} {why}", hint="`autotune profiles prune` deletes such files")


def _require_harmless(text: str) -> None:
    """Refuse what could hurt a terminal or a calculation, before the JSON is parsed."""
    parts = text.split('"')  # no text of ours needs an escape, so every second part is a text
    longest = max(map(len, parts[1::2]), default=0)
    if "\\" in text or not text.isprintable() or longest > MAX_TEXT_LENGTH:
        raise ValueError("is not a record: a text in it is too long or not printable")
    if ABSURD_NUMBER.search(" ".join(parts[::2])):
        raise ValueError("is not a record: a number in it is too large or small to be measured")


def build_record(
    plan: TrainingPlan, hardware: HardwareProfile, calibration: tuple[Residual | None, ...] = ()
) -> Record:
    """Make a record, which may leave this machine, of a plan that was just measured on it.
    `calibration` says for each trial how far it was from its prediction. Raises InvalidInput if the
    plan is no evidence."""
    frozen = plan.frozen
    if reason := unshareable_reason(plan, hardware):
        what = f"this plan cannot be shared: {reason}"
        raise InvalidInput(what, hint="make one with `autotune plan` on this machine")
    work = frozen.process_workload
    # Not the folder's name, nor the shape of the data beyond its largest bucket.
    known = FAMILIES.get(work.model.family)
    model = work.model.changed(name=known.models[0].hub_id if known else work.model.family)
    buckets = (work.largest_bucket.changed(num_items=1),)
    images = work.effective_batch_size / frozen.expected.step_seconds
    expected = {name: getattr(frozen.expected, name) for name in EXPECTED_FIELDS}
    num_tried = sum(not trial.confirms for trial in frozen.trials)
    # A search that a record ended has no longer trial of its winner: the record's stands for it.
    has_verified = bool(frozen.records) and num_tried == len(frozen.trials)
    is_cut_short = num_tried < MIN_CONCLUSIVE_TRIALS and not has_verified
    record = Record(
        schema_version=SCHEMA_VERSION,
        autotune_version=frozen.autotune_version,
        measured_on=datetime.now(UTC).date(),
        machine=shareable_machine(hardware, frozen.hardware.budget_bytes),
        workload=work.changed(model=model, buckets=buckets),
        settings=frozen.settings,
        expected=Expected(images_per_second=images, **expected),
        trials=tuple(map(shareable_trial, frozen.trials)),
        search_seconds=frozen.search_seconds,
        calibration=calibration,
        conclusive=not (frozen.pins or frozen.exclusions or is_cut_short),
    )
    return parse_record(record.content, record.key)  # what is written here can be read elsewhere


def shareable_trial(trial: TrialResult) -> TrialResult:
    """Leave out free text, which may hold a path, and what tells about the data."""
    return trial.changed(
        phases=(), memory_cap_bytes=None, final_loss=None, quantization_error=None, message=""
    )


def shareable_machine(hardware: HardwareProfile, budget_bytes: int | None = None) -> Machine:
    """Take the part of a profile that is shared; by default with the device's budget."""
    device, libraries = hardware.device, {each.needs.library for each in WEIGHT_FORMATS.values()}
    keys = {key: value for key, value in hardware.match_keys.items() if key not in libraries}
    return Machine(
        match_keys=_public_versions(keys),
        device_name=device.name,
        total_memory_bytes=device.total_memory_bytes,
        budget_bytes=device.budget_bytes if budget_bytes is None else budget_bytes,
        logical_cores=hardware.host.logical_cores,
        power_limit_watts=device.power_limit_watts,
        versions=Versions.model_validate(_public_versions(dict(hardware.versions))),
        rates=tuple(rate.changed(conditions=None) for rate in hardware.rates),
        noisy=hardware.noisy,
    )


def _public_versions(versions: dict[str, str | None]) -> dict[str, str | None]:
    """Without local parts, which a builder may have named after a host or a person."""
    return {name: version and version.split("+")[0] for name, version in versions.items()}


def record_folder(workload: Workload) -> str:
    """Name the folder of an architecture: its family for people, its digest to be sure."""
    model = workload.model
    return f"{_slug(model.family)}-{name_of(model.architecture.encode())[:16]}"


def workload_class(workload: Workload) -> str:
    """Name the kind of work: caption length and aspect ratio change little within it."""
    frames = workload.largest_bucket.num_frames
    parts = f"{workload.resolution_px}px-{frames}f-r{workload.rank}-{_slug(workload.targets)}"
    return f"{parts}-b{workload.effective_batch_size}-{workload.text_padding}"


def unshareable_reason(plan: TrainingPlan, hardware: HardwareProfile) -> str | None:
    """Tell why the plan is no evidence about machines like this one; None if it is."""
    planned = plan.frozen.hardware
    if plan.frozen.expected.evidence != "measured" or hardware.origin != "probe":
        return "it was predicted, not measured"
    if planned.match_keys != hardware.match_keys or planned.device_name != hardware.device.name:
        return "it was made on another machine or with other versions than these"
    if plan.frozen.overheads is not None:
        return f"it expects what {plan.frozen.overheads.program} takes, not autotune's executor"
    if any(trial.memory_cap_bytes is not None for trial in plan.frozen.trials):
        return "it was measured under a cap on memory"
    if len(plan.frozen.trials) > MAX_TRIALS:
        return f"it has over {MAX_TRIALS} trials"
    return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "other"


def _find_impossibility(record: Record) -> str | None:
    """Loose on purpose: a true record must never be refused, and a false one costs a trial."""
    if record.measured_on > datetime.now(UTC).date() + timedelta(days=1):
        return "its day is yet to come"  # among similar records the newest leads
    ran = [trial for trial in record.trials if trial.outcome == "ok"]
    if any(not each.peak_memory_bytes or min(each.step_seconds, default=0) <= 0 for each in ran):
        return "a trial that ran has no times or no memory"
    total_bytes = record.machine.total_memory_bytes or math.inf
    if any((trial.peak_memory_bytes or 0) > SPILL_RATIO * total_bytes for trial in ran):
        return "a trial that ran took more than the device has"
    least = _min_step_seconds(record)
    if any(min(trial.step_seconds) < least for trial in ran):
        return f"a step in less than {least:.2g} s is more than the device can compute"
    own = [trial for trial in ran if trial.candidate == record.settings]
    seconds = [value for trial in own for value in trial.step_seconds]
    peaks = [trial.peak_memory_bytes or 0 for trial in own]
    promised, batches = record.expected, [record.workload.effective_batch_size]
    for value, seen in (
        (promised.step_seconds, seconds),
        (promised.peak_memory_bytes, peaks),
        (promised.images_per_second * promised.step_seconds, batches),
    ):
        if not min(seen) * 0.9 <= value <= max(seen) * 1.1:
            return "it promises what its trials did not measure"
    return None


def _min_step_seconds(record: Record) -> float:
    """The time of one operation per weight and patch: of 32 x 32 pixels, and 8 frames."""
    machine, work, bucket = record.machine, record.workload, record.workload.largest_bucket
    patches = bucket.width_px * bucket.height_px / 32**2 * (1 + (bucket.num_frames - 1) / 8)
    operations = work.effective_batch_size * patches * work.model.num_parameters
    is_cpu = machine.match_keys.get("device_kind") == "cpu"
    limit = MAX_FLOPS_PER_CORE * machine.logical_cores if is_cpu else MAX_FLOPS
    probed = (rate.value for rate in machine.rates if rate.name.startswith("matmul."))
    return operations / min(limit, FASTER_THAN_PROBED * max(probed, default=math.inf))


KEY = re.compile(r"[a-z0-9-]{1,60}/[0-9a-f]{64}\.json")
"""Path of a record inside a store; no other path is ever read or written."""
MAX_PUSH_SECONDS = 3600.0  # that writing one record may take


@dataclass(frozen=True)
class RecordFile:
    """A file of a store: the record in it, or why there is none."""

    key: str
    content: bytes
    record: Record | None
    problem: str = ""

    @property
    def name(self) -> str:
        return Path(self.key).stem


class Store:
    """Records in the folder at a path or a URL; `options` go to fsspec's file system."""

    def __init__(self, url: str, **options: Any) -> None:
        is_url = "://" in url
        self.url, self.address = url, files.describe_url(url) if is_url else url
        """The address is for messages, without passwords."""
        path = Path(url).expanduser() if url and not is_url else Path()
        is_odd = "@" in url or files.SCHEME.match(url)
        if not is_url and (not url or (is_odd and not path.exists())):
            raise InvalidInput(  # such a folder would be made here, and may hold a password
                "the store's address is neither a folder nor a URL",
                hint="write s3://bucket/path; of a git repository name the folder of your clone",
            )
        with self._translate_errors():  # fsspec names the package that a protocol needs
            self.fs, root = url_to_fs(url if is_url else str(path.absolute()), **options)
        self.root = str(root).rstrip("/")
        self.folder = Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    def sizes(self, architecture: str = "") -> dict[str, int]:
        """List the bytes of every record by its key; opens no file and follows no link."""
        with self._translate_errors():
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(f"{self.root}/{architecture}".rstrip("/"), detail=True)
                if not found:
                    self.fs.ls(self.root, detail=False)  # tells what cannot be reached
            except FileNotFoundError:
                return {}
        keys = {path[len(self.root) + 1 :]: info for path, info in sorted(found.items())}
        return {
            key: int(info["size"] or 0)
            for key, info in keys.items()
            if KEY.fullmatch(key) and info["type"] == "file" and not info.get("islink")
        }

    def read(self, keys: Sequence[str] | None = None) -> Iterator[RecordFile]:
        """Read the files at these keys, or all; those that were deleted meanwhile are left out."""
        keys = list(self.sizes() if keys is None else keys)
        paths, ends = [self._path(key) for key in keys], [MAX_RECORD_BYTES + 1] * len(keys)
        with self._translate_errors():
            contents = self.fs.cat_ranges(paths, [0] * len(keys), ends, on_error="return")
            for content in contents:
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        for key, content in zip(keys, contents, strict=True):
            if isinstance(content, bytes):
                try:
                    yield RecordFile(key, content, parse_record(content, key))
                except DamagedRecord as error:
                    yield RecordFile(key, content, None, error.message)

    def write(self, key: str, content: bytes) -> None:
        """Write the file whole or not at all: as one PUT, or under another name first."""
        path = self._path(key)
        folder = path.rpartition("/")[0]
        with self._translate_errors():
            if self.folder is None:
                if self.fs.protocol not in ("s3", ("s3", "s3a")):  # there mkdir makes buckets
                    self.fs.makedirs(folder, exist_ok=True)
                self.fs.pipe_file(path, content)
                return
            if Path(folder).is_symlink():
                raise OSError(f"{Path(folder).name} is a link")
            with files.atomic_write(Path(path)) as part:
                part.write_bytes(content)

    def add(self, *records: Record) -> int:
        """Write records that were made here; returns how many were new."""
        sizes = self.sizes()
        absent = [one for one in records if sizes.get(one.key) != len(one.content)]
        for one in absent:
            self.write(one.key, one.content)
        return len(absent)

    def delete(self, key: str) -> None:
        with self._translate_errors():
            self.fs.rm_file(self._path(key))

    def find_abandoned_parts(self) -> list[Path]:
        """List what pushes that were killed have left in a folder, and nobody writes any more."""
        parts = self.folder.glob(f"*/{files.PART_FILES}") if self.folder else ()
        oldest = time.time() - MAX_PUSH_SECONDS
        return [part for part in parts if part.lstat().st_mtime < oldest]

    def _path(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise InvalidInput(f"{key!r} is not the path of a record", hint="see `profiles list`")
        return f"{self.root}/{key}"

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors into one that names the store, without its URL's secrets."""
        try:
            yield
        except AutotuneError:
            raise
        except Exception as error:
            secret = self.url if "://" in self.url else None
            raise AutotuneError(
                f"cannot reach {self.address}: {type(error).__name__}: "
                f"{files.quote_error(error, secret)}",
                hint="check address, network and access, and run it again: what is there is whole",
            ) from None  # the chain would show what was left out


def user_store() -> Store:
    """Open this user's records: what was planned on this machine and what was pulled."""
    return Store(str(files.data_path("profiles")))
