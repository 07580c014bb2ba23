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
from autotune.report.text import without_logins
from autotune.system.files import atomic_write, is_inside, read_bounded
from autotune.system.version import __version__
from autotune.train.folder import REPORT_FILE
from autotune.train.metrics import METRICS_FILE

LEFT_OUT = "(left out)"
VERSIONS = "versions.json"  # which a zip archive names in plain letters
MAX_BYTES = 64 << 20
DIRECT_URL = "direct_url.json"
LAST_LINES = 500  # of a log or of metrics
# Names of variables whose values are secret, and of values in texts.
SECRET = re.compile("TOKEN|SECRET|PASS|CREDENTIAL|KEY|AUTH|PAT$")
NAMED = re.compile(
    r"((?<![a-z])(?:pass\w{0,6}|secret|token|key|authorization)[\"']?[:=]\s?|bearer\s)[^\s,]+", re.I
)
TOKEN = re.compile(
    r"(?<![a-z])(?:hf_|gh[a-z]_|github_pat_|AKIA|ASIA|eyJ|sk-|glpat-)[\w.-]{8,}", re.I
)
LONG = re.compile(r"(?<!sha256:)(?<!\w)[\w+=]{16,}|[0-9a-f]{8}-[0-9a-f-]{27}", re.I)
LINE_PART = re.compile(r"[^\n\"']+")
WORD = re.compile(r"[^\s,;()]+")
PATH = re.compile(r"/|^~|\w@|[\w:]\\+\w|^\\\\\w")  # or an address
RATIO = re.compile(r"[\w.%-]*/(?:s|it|step|image|[\d.]+)[.:]?")
FILES = "png|jpe?g|webp|gif|mp4|webm|mov|mkv|avi|txt|caption|safetensors"
FILE = re.compile(rf"[^\s/\\'\",;:()]+(?=\.(?:{FILES})\b)", re.IGNORECASE)


def bug_report(target: Path | None = None) -> dict[str, str]:
    """Collect what explains an error, with a plan file or a run's folder if one is named, as texts
    by the names of files.

    They are versions, hardware, what the doctor found; the plan, the run's report and the end of
    its log and metrics. Captions, prompts, folders and passwords are left out. What cannot be read
    is named in its place.
    """
    known = os.environ.items()
    private = {value for name, value in known if SECRET.search(name.upper()) and len(value) > 5}
    private |= {platform.node(), platform.node().partition(".")[0]}
    private |= {os.environ.get(name, "").rpartition("/")[2] for name in ("HOME", "USER", "LOGNAME")}
    texts = dict(_facts())
    if target is not None:
        is_run, names = target.is_dir(), (REPORT_FILE, LOG_FILE, METRICS_FILE)
        if not is_run or is_inside(target, RUN_PLAN_FILE):
            texts |= _of_plan(target / RUN_PLAN_FILE if is_run else target, private)
        texts |= {name: _end_of(target, name) for name in names if is_run}
    words = _pattern_of(private)
    return {name: _without(words, text) for name, text in texts.items()}


def write_archive(texts: dict[str, str], path: Path) -> None:
    """Write the texts as a zip archive, over an earlier one at most."""
    own = atomic_write(path, VERSIONS.encode())
    with own as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in texts.items():
            file.writestr(name, text)


def _facts() -> Iterator[tuple[str, str]]:
    facts = read_doctor_facts(System(with_torch=False))
    # What was installed from a folder may have a name that nobody should know.
    packages = {one.name: one.version for one in distributions() if not one.read_text(DIRECT_URL)}
    own = {"python": platform.python_version(), "system": platform.platform()}
    yield VERSIONS, _json({**own, "autotune": __version__, **packages})
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
    private.add(model["name"])  # of a folder, perhaps
    private.discard(model["family"])
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


def _pattern_of(private: set[str]) -> re.Pattern[str]:
    """Match any of the texts as a whole word, as it is and as JSON has it, except JSON's keys."""
    forms = {form for text in private for form in (text, to_json(text).decode()[1:-1])}
    words = [re.escape(form) for form in forms - {"root"} if len(form) > 1]
    either = "|".join(sorted(words, key=len, reverse=True)) or "(?!)"
    return re.compile(rf"(?<![^\W_])(?:{either})(?![^\W_])(?!\": )", re.IGNORECASE)


def _without(private: re.Pattern[str], text: str) -> str:
    text = private.sub(LEFT_OUT, without_logins(text))
    text = TOKEN.sub(LEFT_OUT, NAMED.sub(rf"\1{LEFT_OUT}", text))
    return LINE_PART.sub(_without_paths, LONG.sub(_without_random, text))


def _without_random(word: re.Match[str]) -> str:
    is_random = min(len(re.findall(kind, word[0])) for kind in (r"\d", "[A-Za-z]")) >= 4
    return LEFT_OUT if is_random else word[0]


def _without_paths(part: re.Match[str]) -> str:
    """Leave out all from the first path of a line to its last, since names may have spaces."""
    text = part[0]
    words = (word for word in WORD.finditer(text) if PATH.search(word[0]))
    if paths := [word for word in words if not RATIO.fullmatch(word[0])]:
        text = text[: paths[0].start()] + LEFT_OUT + text[paths[-1].end() :]
    return FILE.sub("*", text)
