"""Reads and writes plan files: YAML that people review, parsed as data only, trusted only when
whole and unedited.

A file is refused when it is too large, uses tags, anchors or repeated keys, holds unknown keys,
comes from another schema, or when its frozen part does not match its digest. Nothing that a plan
names is ever executed.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from autotune.errors import InvalidInput, InvalidPlan, first_line
from autotune.plan.base import MAX_DEPTH, SCHEMA_VERSION, Frozen, digest_of, first_problem
from autotune.plan.job import Job
from autotune.plan.plan import FrozenPart, TrainingPlan
from autotune.system.files import decode_text, read_bounded, write_text_atomic

MAX_PLAN_BYTES = 4 << 20
"""Far above any real plan (a few hundred trials), far below what could hurt."""

MAX_NODES = 100_000  # far above any real plan: reading so many takes some seconds

HEADER = """\
# A training plan, made by autotune. `job` is yours: edit it, or override it on the command line.
# `frozen`, measured or predicted, is covered by `digest`; to change it, run `autotune plan` again.
"""

MARK = b"\ndigest: sha256:"  # of a plan, however it was edited
RUN_PLAN_FILE = "run-plan.yaml"
"""The plan in a run's output folder; it marks such a folder."""

PLAN_AGAIN = "make the plan again with `autotune plan`"


class BoundedLoader(yaml.SafeLoader):
    """SafeLoader without anchors, tags, dates, merge and repeated keys, which no plan needs."""

    depth = nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.YAMLError("anchors and aliases are not allowed")
        if getattr(event, "tag", None):
            raise yaml.YAMLError(f"tags are not allowed: {event.tag}")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError("nested too deeply")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise yaml.YAMLError(f"more than {MAX_NODES} values")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for key, _ in node.value:
            if key.tag != TEXT_TAG:  # of numbers and null, JSON and so the digest would make text
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line} has a key that is not plain text")
        keys = Counter(key.value for key, _ in node.value)
        repeated = sorted(key for key, count in keys.items() if count > 1)
        if repeated:
            raise yaml.YAMLError(f"repeated keys: {', '.join(repeated)}")
        return super().construct_mapping(node, deep)


TEXT_TAG = "tag:yaml.org,2002:str"
NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9]{0,18})",
    "float": r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
"""As people write them, 1e-4 too, and no integer beyond any use. YAML 1.1 takes 1e-4 for text,
0100 for 64 and 1:30 for 90, and a long row of `:1` takes it minutes."""

BoundedLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in (*NUMBERS, "timestamp")
    ]
    for first, resolvers in BoundedLoader.yaml_implicit_resolvers.items()
}


class _PlanDumper(yaml.SafeDumper):
    """Block style for the outline, flow style for lists of numbers."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        flat = all(isinstance(item, int | float) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flat)

    def represent_row(self, row: "_Row") -> Any:
        return self.represent_mapping("tag:yaml.org,2002:map", row, flow_style=True)


class _Row(dict[str, Any]):
    """One row of a long table, written in flow style."""


_PlanDumper.add_representer(_Row, _PlanDumper.represent_row)


for _kind, _pattern in NUMBERS.items():
    for _each in (
        BoundedLoader,
        _PlanDumper,
    ):  # what would be read as a number is quoted where it is text
        _tag = f"tag:yaml.org,2002:{_kind}"
        _each.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


def seal(job: Job, frozen: FrozenPart) -> TrainingPlan:
    """Make a plan whose digest matches its frozen part."""
    return TrainingPlan(job=job, frozen=frozen, digest=digest_of(frozen))


def plan_text(plan: TrainingPlan) -> str:
    """Write the plan as YAML: the digest, the job, then the frozen part."""
    data = plan.model_dump(mode="json")
    if forecast := data["frozen"]["forecast"]:
        forecast["alternatives"] = [_Row(row) for row in forecast["alternatives"]]
    parts = {name: data[name] for name in ("digest", "job", "frozen")}
    how: dict[str, Any] = {"sort_keys": False, "width": 110, "allow_unicode": True}
    return HEADER + str(yaml.dump(parts, Dumper=_PlanDumper, **how))


def save_plan(plan: TrainingPlan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Examples:
        >>> autotune.save_plan(autotune.load_plan("plan.yaml"), "copy.yaml")
    """
    write_text_atomic(Path(path), plan_text(plan))


def load_plan(plan: TrainingPlan | str | Path) -> TrainingPlan:
    """Read and validate a plan file; a plan is returned as it is. Says nothing about whether it
    fits this machine: `check` does.

    Raises:
        InvalidPlan: the file cannot be read, is not a plan, has another schema, or was edited where
            it is frozen.

    Examples:
        >>> plan = autotune.load_plan("plan.yaml")
        >>> plan.job.num_steps, plan.frozen.settings
    """
    if isinstance(plan, TrainingPlan):
        return plan
    path = Path(plan)
    return _load(str(path), _parse(path, _read_text(path)))


def parse_plan(text: str) -> TrainingPlan:
    """Read a plan from the JSON that a study keeps. Raises InvalidPlan as `load_plan`."""
    try:
        return _load("the study's plan", dict(json.loads(text)))
    except (TypeError, ValueError, RecursionError) as error:
        what = f"the study's plan is damaged: {error}"
        raise InvalidPlan(what, hint="name another --study") from error


def _load(source: str, written: dict[str, Any]) -> TrainingPlan:
    frozen = written.get("frozen")
    version = frozen.get("schema_version") if isinstance(frozen, dict) else None
    if type(version) is int and version != SCHEMA_VERSION:
        raise InvalidPlan(
            f"{source} has schema {version}, and this autotune reads schema {SCHEMA_VERSION} only",
            hint=PLAN_AGAIN if version < SCHEMA_VERSION else "update autotune",
        )
    plan = _validated(source, written)
    actual = digest_of(plan.frozen)
    if actual != plan.digest:
        raise InvalidPlan(
            f"the frozen part of {source} was edited: it has digest {actual[:15]}..., not "
            f"{plan.digest[:15]}...",
            hint=f"undo the edit (only `job` may be changed), or {PLAN_AGAIN}",
        )
    return plan


def _read_text(path: Path) -> str:
    try:
        if not path.exists() or path.is_dir():
            what = f"there is no plan at {path}"
            raise InvalidPlan(what, hint="make one with `autotune plan --model MODEL -o plan.yaml`")
        text = read_bounded(path, MAX_PLAN_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidPlan(f"cannot read {path}: {reason}", hint=PLAN_AGAIN) from error
    if not text.strip():
        raise InvalidPlan(f"{path} is empty", hint=PLAN_AGAIN)
    return text


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        data = yaml.load(text, Loader=BoundedLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        what = f"{path} is not YAML that a plan may use: {reason}"
        raise InvalidPlan(what, hint=f"correct that, or {PLAN_AGAIN}") from error
    if not isinstance(data, dict):
        raise InvalidPlan(f"{path} holds {type(data).__name__}, not a plan", hint=PLAN_AGAIN)
    return data


def _validated(source: str, data: Any) -> TrainingPlan:
    try:
        return TrainingPlan.model_validate_json(
            json.dumps(data)
        )  # NaN passes here, so that the field is named
    except ValidationError as error:
        where, message = first_problem(error)
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        what = f"{source} is not a valid plan: {where or 'the file'}: {message}{more}"
        hint = "correct it under `job`" if where.startswith("job") else PLAN_AGAIN
        raise InvalidPlan(what, hint=hint) from error


def with_job(plan: TrainingPlan, **changes: object) -> TrainingPlan:
    """Return the plan for another job; None leaves a value as it is. Raises InvalidPlan."""
    overrides = {key: value for key, value in changes.items() if value is not None}
    return plan.changed(job=job_from(dict(plan.job), overrides))


def job_from(before: Mapping[str, object], overrides: Mapping[str, object]) -> Job:
    """Return the job with the values of `before`, except `overrides`. Raises InvalidPlan."""
    gone: dict[str, object] = {}
    if overrides.keys() & {"model", "base"}:
        gone["revision"] = None  # a commit of another repository
    if "num_steps" in overrides:
        gone["num_train_epochs"] = None
    if "checkpointing_steps" in overrides:
        gone["checkpointing_epochs"] = None
    try:
        return Job.model_validate({**before, **gone, **overrides})
    except ValidationError as error:
        where, message = first_problem(error)
        raise InvalidPlan(f"job.{where}: {message}", hint="give the job another value") from error


MAX_FILE_BYTES = 1 << 20

T = TypeVar("T", bound=Frozen)


def read_listing(
    path: Path, kind: type[T], what: str, hint: str, loader: type[BoundedLoader] = BoundedLoader
) -> T:
    """Read an untrusted YAML file that lists something, `what` in errors. Raises InvalidInput."""
    try:
        content = yaml.load(decode_text(read_bounded(path, MAX_FILE_BYTES)), Loader=loader)
        return kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problem = ": ".join(filter(None, first_problem(error)))
        raise InvalidInput(f"{path} lists no {what}: {problem}", hint=hint) from error
    except OSError as error:  # what to write into a file is no help where there is none
        reason = error.strerror or first_line(error)
        what = f"cannot read {path}, which should list {what}: {reason}"
        raise InvalidInput(what, hint="check the path") from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(f"{path} lists no {what}: {reason}", hint=hint) from error
