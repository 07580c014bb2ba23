"""Plans, and folders of runs, read for an HTML page (`report`) and for a model card on the hub.

Reading needs neither torch nor a machine.
"""

import base64
import contextlib
import io
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path

import yaml

from autotune.data.pixels import open_image, to_rgb
from autotune.errors import AutotuneError, InvalidInput, first_line
from autotune.events import Event, Notice, OnEvent, PreviewsWritten, StepFinished
from autotune.models.registry import find_published, get_family
from autotune.plan.file import RUN_PLAN_FILE, load_plan
from autotune.plan.job import MAX_PREVIEW_PROMPTS
from autotune.plan.plan import RunReport, TrainingPlan
from autotune.report.page import Picture, Preview, Subject, build_page, has_plotly
from autotune.report.plan import settings_items
from autotune.report.run import LOG_FILE, PAGE_FILE, report_lines
from autotune.report.text import printable, titled_lines
from autotune.system.files import atomic_write, is_inside, read_bounded, write_text_atomic
from autotune.system.version import __version__
from autotune.train.folder import ADAPTER_FILE, PREVIEW_NAME, PREVIEWS, REPORT_FILE, comparison_file
from autotune.train.metrics import METRICS_FILE, Steps, read_metrics
from autotune.weights.files import read_header
from autotune.weights.hub import upload

MAX_PAGE_BYTES = 8 << 20  # of a run's report, too
MAX_METRICS_BYTES = 64 << 20  # some 200,000 steps
MAX_SUBJECTS = 8
SUBJECTS = "name a plan file, or the output folder of `autotune train`"
PICTURE_BYTES = 2 << 20  # of all runs on a page, in base64; plotly takes 4.8 MB
PAGE_SHARE = 0.01  # of a run's time, at most, goes into its pages before the one at its end
MAX_PREVIEWS = 48
MAX_FILES = 10_000
MAX_SIDE_PX = 320
MAX_COMPARED_SIDE_PX = 640
MAX_PIXELS = 1 << 24
SMALL_SIDE_PX = 128  # pictures up to this size are kept without loss


def report(*subjects: str | Path | TrainingPlan, path: str | Path | None = None) -> Path:
    """Write one HTML page about plan files, plans, and output folders of runs, and return its path.

    It opens from disk and asks for nothing from a network. By default it is `report.html` in the
    folder of a single run, else in this folder. Raises InvalidPlan, and InvalidInput without the
    extra `report`, or if something is neither a plan nor a run, or would be replaced.

    Examples:
        >>> autotune.report("first-run", "second-run", path="compared.html")
    """
    if not 1 <= len(subjects) <= MAX_SUBJECTS:
        what = f"a report shows 1 to {MAX_SUBJECTS} plans or runs, not {len(subjects)}"
        raise InvalidInput(what, hint=SUBJECTS)
    files = [Path(subject) for subject in subjects if not isinstance(subject, TrainingPlan)]
    folder = files[0] if len(subjects) == 1 and files and files[0].is_dir() else Path()
    target = folder / PAGE_FILE if path is None else Path(path)
    hint = "write it elsewhere: -o FILE.html"
    if target.suffix.lower() not in (".html", ".htm") and (run := _folder_of_run(target)):
        raise InvalidInput(f"{target} is one of the files of the run in {run}", hint=hint)
    found = [_read_subject(each, PICTURE_BYTES // len(subjects)) for each in subjects]
    try:
        page = build_page(found, __version__)
    except (ArithmeticError, ValueError) as error:
        message = f"a file holds impossible numbers: {first_line(error)}"
        raise InvalidInput(message, hint="copy the file again from where it was made") from error
    if sum(map(len, page)) > MAX_PAGE_BYTES:
        raise InvalidInput("the page would be over 8 MiB", hint="show fewer at once")
    try:
        with atomic_write(target, b"<!DOCTYPE html>") as part, part.open("wb") as written:
            written.writelines(page)
    except OSError as error:
        raise InvalidInput(f"cannot write {target}: {error.strerror}", hint=hint) from error
    return target


def _folder_of_run(file: Path) -> Path | None:
    parents = file.absolute().parents
    return next((folder for folder in parents if (folder / RUN_PLAN_FILE).is_file()), None)


def _read_subject(subject: str | Path | TrainingPlan, picture_bytes: int) -> Subject:
    if isinstance(subject, TrainingPlan):
        return Subject("plan", subject)
    path = Path(subject)
    if path.is_dir():
        return read_run(path, picture_bytes)
    if not path.is_file():
        raise InvalidInput(f"there is neither a plan nor a run's folder at {path}", hint=SUBJECTS)
    try:
        return Subject(path.name, load_plan(path))
    except AutotuneError as error:
        if path.suffix not in (".yaml", ".yml") and (folder := _folder_of_run(path)):
            hint = f"name the run's folder: autotune report {shlex.quote(str(folder))}"
            raise InvalidInput(f"{path} is a file inside a run, not a run", hint=hint) from error
        raise


def read_run(folder: Path, picture_bytes: int = PICTURE_BYTES) -> Subject:
    """Read the output folder of a run, as far as possible. Raises InvalidInput if it is none."""
    file, notes = folder / RUN_PLAN_FILE, list[str]()
    if not file.exists():
        what = f"{folder} is not the output folder of a run: it has no {RUN_PLAN_FILE}"
        raise InvalidInput(what, hint=SUBJECTS)
    plan, metrics = load_plan(file), folder / METRICS_FILE
    is_large = metrics.is_file() and metrics.stat().st_size > MAX_METRICS_BYTES
    if is_large:
        notes.append(f"{METRICS_FILE} is over {MAX_METRICS_BYTES >> 20} MiB and was left out.")
    return Subject(
        folder.resolve().name,
        plan,
        is_run=True,
        previews=_read_previews(folder, 2 * picture_bytes // 3, notes),
        comparisons=_read_comparisons(folder, plan.job.preview_titles, picture_bytes // 3, notes),
        steps=Steps.of(() if is_large else read_metrics(metrics, notes.append)),
        report=_read_report(folder / REPORT_FILE, notes),
        notes=notes,
    )


def _read_report(path: Path, notes: list[str]) -> RunReport | None:
    try:
        return RunReport.model_validate_json(read_bounded(path, MAX_PAGE_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        notes.append(f"{path.name} cannot be read.")
        return None


def _read_previews(folder: Path, max_bytes: int, notes: list[str]) -> list[Preview]:
    previews = folder / PREVIEWS
    if not previews.is_dir():
        return []
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in islice(previews.iterdir(), MAX_FILES):
        if named := PREVIEW_NAME.fullmatch(path.name):
            found.setdefault(int(named[2]), []).append((int(named[1]), path))
    numbers = sorted(found)[:MAX_PREVIEW_PROMPTS]
    pictures: list[Preview] = []
    for number in numbers:
        steps, most = sorted(found[number]), MAX_PREVIEWS // len(numbers)
        if len(steps) > most:
            steps = [steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)]
        for step, path in steps:
            picture = _read_picture(folder, f"{PREVIEWS}/{path.name}", MAX_SIDE_PX, notes)
            if picture is None:
                continue
            max_bytes -= len(picture.source)
            if max_bytes < 0:
                notes.append("Some previews were left out: together they are too large for a page.")
                return pictures
            pictures.append((number, step, picture))
    return pictures


def _read_comparisons(
    folder: Path, titles: Sequence[str], max_bytes: int, notes: list[str]
) -> list[tuple[str, Picture, Picture]]:
    pairs = []
    for number, title in enumerate(titles):
        files = [comparison_file(adapter, number) for adapter in ("without", "with")]
        if not all((folder / file).is_file() for file in files):
            continue
        without, adapted = (
            _read_picture(folder, file, MAX_COMPARED_SIDE_PX, notes) for file in files
        )
        if without is None or adapted is None:
            continue
        max_bytes -= len(without.source) + len(adapted.source)
        if max_bytes >= 0:
            pairs.append((title, without, adapted))
    return pairs


def _read_picture(folder: Path, name: str, max_side_px: int, notes: list[str]) -> Picture | None:
    path = folder / name
    try:
        if not is_inside(folder, name):  # pages are passed on
            raise OSError("it is a link, or in a linked folder")
        kind, content, size = encode_picture(path, max_side_px, path.stat().st_mtime_ns)
    except (InvalidInput, OSError) as error:
        notes.append(f"{path.name} cannot be shown: {first_line(error)}")
        return None
    encoded = base64.b64encode(content).decode()
    return Picture(f"data:image/{kind};base64,{encoded}", *size)


@lru_cache(maxsize=256)
def encode_picture(
    path: Path, max_side_px: int, changed_at: int
) -> tuple[str, bytes, tuple[int, int]]:
    """Make a picture small and encode it anew, so that no byte of a file goes into a page as it is;
    return its format, bytes and size. `changed_at` tells one version of the file from another.
    Raises InvalidInput."""
    try:
        with open_image(path) as image:
            image.draft("RGB", (2 * max_side_px, 2 * max_side_px))  # a large JPEG is read smaller
            if image.width * image.height > MAX_PIXELS:
                raise OSError(f"it has over {MAX_PIXELS >> 20} megapixels")
            small = to_rgb(image)
    except Exception as error:  # decoders raise anything for damaged files
        raise InvalidInput(first_line(error), hint="check the file") from error
    small.thumbnail((max_side_px, max_side_px))
    kind = "png" if max(small.size) <= SMALL_SIDE_PX else "jpeg"
    content = io.BytesIO()
    small.save(content, format=kind, quality=85)  # of a PNG there is none
    return kind, content.getvalue(), small.size


class RunPage:
    """A listener that keeps log and page of a run up to date; a failure never costs the run."""

    def __init__(
        self, folder: Path, on_event: OnEvent, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.on_event, self.clock = folder, on_event, clock
        self.has_trained, self.next_at = False, clock()
        if not has_plotly():
            install = "plotly is not installed: pip install 'lora-autotune[report]'"
            on_event(Notice(text=f"no {PAGE_FILE}: {install}", level="warning"))

    def __call__(self, event: Event) -> None:
        self.log(*event.logged)
        self.on_event(event)
        self.has_trained = self.has_trained or isinstance(event, StepFinished)
        if isinstance(event, PreviewsWritten) and (started_at := self.clock()) >= self.next_at:
            self.write()
            ended_at = self.clock()
            self.next_at = ended_at + (ended_at - started_at) / PAGE_SHARE

    def log(self, level: int, text: str) -> None:
        """Add a line with the time to the log of the run."""
        with contextlib.suppress(OSError):
            if level > logging.DEBUG and self.folder.is_dir():
                with (self.folder / LOG_FILE).open("a", encoding="utf-8", errors="replace") as file:
                    file.write(f"{datetime.now():%F %T} {logging.getLevelName(level)} {text}\n")

    def write(self) -> None:
        """Write the page; if that fails tell why, unless that was told at the start."""
        if not has_plotly():
            return
        try:
            report(self.folder, path=self.folder / PAGE_FILE)
        except Exception as error:  # a run is worth more than its page
            self.on_event(Notice(text=f"no {PAGE_FILE}: {first_line(error)}", level="warning"))


# What the hub calls each kind of model.
TASKS = {"image": "text-to-image", "edit": "image-to-image", "video": "text-to-video"}


def _model_card(
    run: Subject, report: RunReport, name: str, pictures: Sequence[tuple[str, str]]
) -> str:
    """Markdown with the hub's header; of the data it tells only the number of items."""
    job, work = run.plan.job, run.plan.frozen.workload
    family = get_family(work.model.family).with_expert(job.expert)
    task = "image-to-video" if family.starts_from_picture else TASKS[family.kind]
    hub_id = (job.base or job.model) if job.revision is not None else None
    published = find_published(hub_id or work.model.name)
    base_model = published[1].hub_id if published else hub_id
    header = {
        "base_model": base_model,
        "license": published[1].license if published else None,
        "library_name": "diffusers",
        "pipeline_tag": task,
        "tags": ["lora", "diffusers", "autotune", task],
        "widget": [{"text": prompt, "output": {"url": file}} for prompt, file in pictures],
    }
    told = {key: value for key, value in header.items() if value}
    base = json.dumps(base_model or "FOLDER OF THE BASE MODEL", ensure_ascii=False)
    num_items = sum(bucket.num_items for bucket in work.buckets)
    return "\n".join(
        [
            "---",
            yaml.safe_dump(told, sort_keys=False, allow_unicode=True).rstrip(),
            "---",
            f"# {name.rpartition('/')[2]}",
            "",
            f"A {'LoKr' if work.adapter == 'lokr' else 'LoRA'} for "
            f"{_escaped(base_model or work.model.name)}, trained by autotune: rank {work.rank} "
            f"on {_escaped(work.targets)}, effective batch {work.effective_batch_size}, "
            f"{report.num_steps} steps at a learning rate of {job.learning_rate:g} "
            f"({work.optimizer.name}), on {num_items} items.",
            "",
            *(f"![{_escaped(prompt)}]({file})\n" for prompt, file in pictures),
            "```python",
            *family.loading_code(base),
            family.adapter_code(work.adapter, name, ADAPTER_FILE),
            "```",
            "",
            "```",
            *titled_lines(settings_items(run.plan)),
            "",
            *report_lines(report.changed(warnings=())),  # they name files of this machine
            "```",
            "",
        ]
    )


def _escaped(text: str) -> str:
    """One line that Markdown shows as it is: a prompt may hold anything."""
    return re.sub(r"([\\`*_\[\]<>&~|$!])", r"\\\1", printable(" ".join(text.split())))


def push_to_hub(folder: Path, repo: str, tell: Callable[[str], None]) -> str:
    """Upload a run's adapter, samples and model card, nothing of the data; return the address.
    `tell` gets the list of files before they leave. Raises AutotuneError if a file is a link, or
    not what its name says, if the hub cannot be reached, or the token may not write there."""
    found = read_run(folder)
    if found.report is None or not os.path.lexists(folder / ADAPTER_FILE):
        hint = "finish it first: autotune train --resume"
        raise InvalidInput(f"{folder} holds no finished run", hint=hint)
    shows_data = found.plan.frozen.workload.num_control_images > 0  # which previews edit
    pictures = [
        (prompt, name)
        for at, prompt in enumerate(() if shows_data else found.plan.job.preview_prompts or ())
        if os.path.lexists(folder / (name := comparison_file("with", at)))
    ]
    names = (ADAPTER_FILE, *(name for _, name in pictures))
    for name in names:
        _require_own(folder, name)
    write_text_atomic(folder / "README.md", _model_card(found, found.report, repo, pictures))
    names = ("README.md", *names)
    tell(f"uploading to {repo}: {', '.join(names)}")
    return upload(repo, {name: folder / name for name in names})


def _require_own(folder: Path, name: str) -> None:
    """Refuse what a run did not write: a link, or other content, could publish anything."""
    path = folder / name
    try:
        if not is_inside(folder, name):
            raise OSError("it is a link, or in a linked folder")
        if path.name == ADAPTER_FILE:
            read_header(path)
        else:
            open_image(path).close()
    except (AutotuneError, OSError) as error:
        why = f"{path} is not uploaded: {first_line(error)}"
        raise InvalidInput(why, hint="upload only what the run wrote: remove the file") from error
