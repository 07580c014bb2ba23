"""An archive for whoever looks into an error: facts, plan and log, without what is private."""

import json
import os
import platform
import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from autotune.errors import AutotuneError
from autotune.machine.doctor import findings, read_doctor_facts
from autotune.machine.sources import System
from autotune.plan.file import RUN_PLAN_FILE, load_plan
from autotune.plan.job import Job
from autotune.report.run import LOG_FILE
from autotune.report.text import titled_lines, without_logins
from autotune.system.files import atomic_write, is_inside, read_bounded
from autotune.train.folder import REPORT_FILE
from autotune.train.metrics import METRICS_FILE

LEFT_OUT = "(left out)"
MAX_BYTES = 64 << 20
LAST_LINES = 500  # of a log or of metrics
SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$")
# Names with a slash before each, perhaps after a drive; of a row of slashes the first two begin it.
PATH = re.compile(
    r"(?:(?<![\w./\\])(?:[A-Za-z]:)?|(?<=[\w.][/\\]))(?:[/\\]+[^/\\\s'\",;:)]{1,255})+"
)
NAME = re.compile(r"[^\s/\\'\",;:()]+")
MEDIA = re.compile(r"\.(png|jpe?g|webp|gif|mp4|webm|mov|mkv|avi|txt|caption)$", re.IGNORECASE)


def bug_report(target: Path | None = None, path: Path | None = None) -> dict[str, str]:
    """Collect what explains an error, of a plan file or a run's folder if one is named, and write
    it to `path` as a zip archive.

    Returns the archive's texts by name: versions, hardware, what the doctor found; the plan, the
    run's report and the end of its log and metrics. Captions, prompts, folders and passwords are
    left out. What cannot be read is named in its place.
    """
    known = os.environ.items()
    private = {value for name, value in known if SECRET.search(name.upper()) and len(value) > 7}
    private |= {platform.node(), os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    texts = dict(_facts())
    if target is not None:
        is_run, names = target.is_dir(), (REPORT_FILE, LOG_FILE, METRICS_FILE)
        if not is_run or is_inside(target, RUN_PLAN_FILE):
            texts |= _of_plan(target / RUN_PLAN_FILE if is_run else target, private)
        texts |= {name: _end_of(target, name) for name in names if is_run}
    words = sorted((word for word in private - {"root"} if len(word) > 2), key=len, reverse=True)
    texts = {name: _without(words, text) for name, text in texts.items()}
    if path is not None:
        with atomic_write(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
            for name, text in texts.items():
                file.writestr(name, text)
    return texts


def _facts() -> Iterator[tuple[str, str]]:
    facts = read_doctor_facts(System(with_torch=False))
    packages = {each.name: each.version for each in distributions()}
    versions = {"python": platform.python_version(), "system": platform.platform(), **packages}
    yield "versions.json", _json(versions)
    yield "machine.json", _json(facts)
    yield "doctor.json", _json(findings(facts))


def _of_plan(file: Path, private: set[str]) -> dict[str, str]:
    try:
        plan = load_plan(file).model_dump(mode="json")
    except AutotuneError as error:
        return {"plan.txt": error.message}
    # Of the job's texts only those stay that are one of a few choices: others may be private.
    fields = Job.model_json_schema()["properties"]
    for name, value in plan["job"].items():
        is_choice = "enum" in json.dumps(fields[name]) or value == fields[name].get("default")
        if not (is_choice or value is None or isinstance(value, int | float)):
            private |= {value} if isinstance(value, str) else set(map(str, value))
            plan["job"][name] = LEFT_OUT
    model = plan["frozen"]["workload"]["model"]
    private.add(model["name"])  # of a folder, perhaps; the family stays
    return {"plan.json": _json(plan)}


def _end_of(folder: Path, name: str) -> str:
    if not is_inside(folder, name):  # what it leads to may be private
        return "a link"
    try:
        text = read_bounded(folder / name, MAX_BYTES).decode(errors="replace")
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(text.splitlines()[-LAST_LINES:])


def _json(facts: Any) -> str:
    return to_json(facts, indent=1, inf_nan_mode="null").decode() + "\n"


def _without(private: list[str], text: str) -> str:
    for word in private:
        text = text.replace(word, LEFT_OUT)
    text = re.sub(r"\bhf_\w{8,}|\bAKIA\w{12,}", LEFT_OUT, without_logins(text))
    return NAME.sub(_without_stem, PATH.sub(LEFT_OUT, text))


def _without_stem(name: re.Match[str]) -> str:
    found = MEDIA.search(name[0])
    return f"*{found[0]}" if found else name[0]


def summary_lines(texts: dict[str, str]) -> list[str]:
    """List what an archive holds."""
    return titled_lines((name, f"{len(text.splitlines())} lines") for name, text in texts.items())
