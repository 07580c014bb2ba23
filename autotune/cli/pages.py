"""The pages of `autotune ui`: each asks the public API and fills a template; long work is a command
of its own, whose words are shown.
"""

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from starlette.responses import FileResponse, RedirectResponse, Response

import autotune
from autotune import events
from autotune.cli import exchange  # noqa: F401 - it adds its commands to `app`
from autotune.cli.commands import app
from autotune.cli.jobs import ANSWER, EVENTS, EXIT, Job, is_locked
from autotune.cli.options import GIVEN
from autotune.cli.server import Asked, Site, route
from autotune.data.captions import edit_captions, last_edit, read_captions, reworded, undo_edit
from autotune.data.media import CAPTION_SUFFIXES
from autotune.data.pixels import IMAGE_SUFFIXES, open_image
from autotune.errors import AutotuneError, InvalidInput
from autotune.plan.candidate import TrialResult
from autotune.plan.file import RUN_PLAN_FILE, load_plan
from autotune.report import files as reports
from autotune.report.machine import PROBLEMS
from autotune.report.page import Subject, plan_view, run_view, trials_chart
from autotune.report.run import trial_text
from autotune.report.text import memory_text, range_text, rough_seconds, seconds_text
from autotune.system.files import open_regular
from autotune.train.folder import ADAPTER_FILE, LOCK_FILE, REPORT_FILE
from autotune.train.metrics import METRICS_FILE

STATIC = {"page.css": "text/css", "page.js": "text/javascript", "app.css": "text/css"}
STATIC |= {"app.js": "text/javascript", "htmx.min.js": "text/javascript"}
PAGE_SIZE = 60  # pictures on a page
THUMB_PX = 320
MAX_DEPTH, MAX_PLACES = 4, 4000  # of folders that are looked through
UPLOADED = {*IMAGE_SUFFIXES, *CAPTION_SUFFIXES, ".jsonl", ".csv", ".yaml", ".yml", ".toml", ".json"}
ON_DEVICE = ("probe", "train", "sample")  # and plans for this machine: one at a time
SEVERITIES = {"broken": 0, "tiny": 1, "short": 1, "control": 1, "mask": 1, "captionless": 2}
FIRST = ("model", "data", "hardware", "resolution", "num_steps", "quality", "max_memory")
MORE = (
    *("trigger", "rank", "lora_alpha", "targets", "effective_batch_size", "learning_rate"),
    *("lr_scheduler", "timestep_shift", "num_train_epochs", "preview_prompts", "preview_every"),
    *("validation", "flip", "objective", "optimizer", "host_memory", "max_trials"),
    *("search_seconds", "pins", "base", "control"),
)
FIELDS = {  # of each command, those that the page's forms may fill in
    "probe": (),
    "plan": (*FIRST, *MORE, "path", "output"),
    "train": ("plan", "output", "num_steps", "preview_prompts", "preview_every", "resume"),
    "sample": ("run_folder", "prompt", "count", "seed", "num_steps", "strengths", "path"),
    "compare": (
        "model",
        "data",
        "resolution",
        "num_steps",
        "quality",
        "max_cost",
        "max_hours",
        "prices",
    ),
    "audit": ("config_file", "hardware"),
    "data caption": ("place", "trigger", "replacements"),
    "weights convert": ("source", "target", "to", "overwrite"),
    "profiles list": (),
}
PATHS = {"data", "base", "control", "output", "path", "plan", "run_folder", "config_file"}
PATHS |= {"source", "target", "prices", "place"}
FORMATS = {"diffusers": "diffusers", "comfyui": "ComfyUI", "kohya": "Kohya"}


# --- Commands ------------------------------------------------------------------------------------


def _command(name: str) -> click.Command:
    command: Any = app
    for word in name.split():
        command = command.commands[word]
    return command  # type: ignore[no-any-return]


def build_words(site: Site, name: str, asked: Asked) -> list[str]:
    """Write the command that a form asks for. Raises InvalidInput for a path outside."""
    if name not in FIELDS:
        raise InvalidInput(f"the page has no command {name}", hint="use the terminal")
    command = _command(name)
    words, arguments = name.split(), list[str]()
    for one in command.get_params(click.Context(command)):
        if one.name not in FIELDS[name]:
            continue
        is_many = isinstance(one, click.Option) and one.multiple
        texts = [line for text in asked.many(one.name) for line in text.splitlines()[:100]]
        texts = texts if is_many else asked.many(one.name)[:1]
        values = [_checked(site, one.name, text) for text in texts if text]
        if isinstance(one, click.Argument):
            arguments += values
        elif isinstance(one, click.Option) and one.is_flag:
            words += [one.opts[-1]] if "on" in values else []
        else:
            flag = max(one.opts, key=len)
            for value in values:
                words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
    ends = ["--"] if any(value.startswith("-") for value in arguments) else []
    return [*words, *ends, *arguments]


def _checked(site: Site, name: str, value: str) -> str:
    if name in PATHS:
        return site.shown(site.inside(value))
    if name == "hardware" and value not in {gpu.id for gpu in autotune.list_gpus()}:
        raise InvalidInput(f"the catalog has no {value}", hint="choose a card from the list")
    if name == "optimizer" and ":" in value:
        raise InvalidInput("a class of another package is loaded", hint="use the terminal")
    if name == "model":
        place = site.workspace / value
        if place.exists() or value.startswith(("/", ".", "~")):
            return site.shown(site.inside(value))
    if name == "validation" and not value.endswith("%"):
        return site.shown(site.inside(value))
    return value


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """The values that a command's words give, by name; none if they are not understood."""
    name = " ".join(words[:2]) if " ".join(words[:2]) in FIELDS else words[0]
    if name not in FIELDS:
        return {}
    command = _command(name)
    try:
        context = command.make_context(name, [*words[len(name.split()) :]], resilient_parsing=True)
    except (click.ClickException, ValueError):
        return {}
    given = context.params.items()
    return {name: v for name, v in given if context.get_parameter_source(name) in GIVEN}


def _is_queued(words: Sequence[str]) -> bool:
    return words[0] in ON_DEVICE or (words[0] == "plan" and "--hardware" not in words)


def command_text(words: Sequence[str]) -> str:
    """The command as a shell takes it."""
    return shlex.join(["autotune", *words])


@route("/command")
def _show_command(site: Site, asked: Asked) -> Response:
    name = asked.one("command")
    _complete(site, name, asked)
    words = build_words(site, name, asked)
    return site.render("command_part.html", command=command_text(words))


@route("/jobs", "POST")
def _start_job(site: Site, asked: Asked) -> Response:
    name = asked.one("command")
    _complete(site, name, asked)
    words = build_words(site, name, asked)
    job = site.jobs.start(words, is_queued=_is_queued(words))
    return RedirectResponse(_place_of(site, job), 303)


def _complete(site: Site, name: str, asked: Asked) -> None:
    """Name the files of a command that the form leaves open, as no command asks twice."""
    if name == "plan" and not asked.one("path"):
        asked["path"] = [_unused(site, "plan", ".yaml")]
    if name == "train" and not asked.one("output"):
        asked["output"] = [_unused(site, f"runs/{Path(asked.one('plan', 'run')).stem}", "")]
    if name == "sample":
        run, texts = asked.one("run_folder"), [asked.one(n) for n in ("prompt", "seed")]
        named = "-".join(re.sub(r"[^a-z0-9]+", "-", text.lower())[:40] for text in texts)
        asked["path"] = [f"{run}/samples/{named.strip('-') or 'sample'}.png"]
    if name == "data caption":
        asked["place"], find = [asked.one("folder")], asked.one("find")
        asked["replacements"] = [f"{find}={asked.one('replacement')}"] * bool(find)
    if name == "weights convert":
        asked["source"] = [f"{asked.one('run_folder')}/{ADAPTER_FILE}"]
        target = f"{asked.one('to')}_lora_weights.safetensors"
        asked["target"], asked["overwrite"] = [f"{asked.one('run_folder')}/{target}"], ["on"]


def _unused(site: Site, stem: str, suffix: str) -> str:
    names = (f"{stem}{'' if number == 1 else f'-{number}'}{suffix}" for number in range(1, 10**6))
    return next(name for name in names if not os.path.lexists(site.workspace / name))


def _place_of(site: Site, job: Job) -> str:
    if job.words[0] == "train":
        return f"/run?folder={_quoted(str(values_of(job.words).get('output', '')))}"
    return f"/jobs/{job.name}"


def _quoted(text: str) -> str:
    return quote(text, safe="")


@route("/jobs/{name}")
def _show_job(site: Site, asked: Asked) -> Response:
    job = _find_job(site, asked)
    return site.render("job.html", page=_page_of(job), **job_view(site, job))


@route("/jobs/{name}/live")
def _show_live_job(site: Site, asked: Asked) -> Response:
    return site.render("job_part.html", **job_view(site, _find_job(site, asked)))


@route("/jobs/{name}/stop", "POST")
def _stop_job(site: Site, asked: Asked) -> Response:
    job = _find_job(site, asked)
    job.stop()
    return RedirectResponse(_place_of(site, job), 303)


def _find_job(site: Site, asked: Asked) -> Job:
    job = site.jobs.find(asked.one("name"))
    if job is None:
        raise InvalidInput("there is no such job", hint="it may have been removed")
    return job


def _page_of(job: Job) -> str:
    pages = {"plan": "plan", "train": "train", "sample": "results", "weights": "results"}
    return {**pages, "probe": "machine", "profiles": "records", "audit": "import"}.get(
        job.words[0], job.words[0]
    )


def job_view(site: Site, job: Job) -> dict[str, Any]:
    """Gather what a job told: where it stands, its trials, its result, or why it failed."""
    told, lines = job.told()
    view: dict[str, Any] = {"job": job, "state": job.state, "command": command_text(job.words)}
    view |= {"status": "", "done": 0, "total": 0, "chart": None, "trials": [], "plan": None}
    trials, notices, batch = list[TrialResult](), list[events.Notice](), 1
    for line in told:
        name = line.pop("event", "")
        kind = getattr(events, str(name), None)
        if not (isinstance(kind, type) and issubclass(kind, events.Event)):
            continue
        try:
            event = kind.model_validate_json(json.dumps(line))
        except ValueError:
            continue
        match event:
            case events.PhaseStarted():
                view |= {"status": event.name, "total": 0}
            case events.StatusChanged():
                view["status"] = event.text
            case events.Progressed():
                view |= {"status": event.name, "done": event.done, "total": event.total}
            case events.Notice():
                notices.append(event)
            case events.SearchSpaceBuilt():
                batch = event.workload.effective_batch_size
                view |= {"done": 0, "total": event.max_trials, "status": "searching"}
            case events.StepFinished():
                view |= {"status": "training, step", "done": event.step, "total": event.num_steps}
            case events.TrialFinished():
                trials.append(event.result)
                view |= {"done": len(trials), "status": "trying settings"}
                if len(trials) >= view["total"]:
                    view |= {"total": 0, "status": "trying the best for longer"}
    total = view["total"] if trials else 0
    view["trials"] = [trial_text(at, total, one) for at, one in enumerate(trials, 1)]
    view["chart"] = trials_chart(trials, batch)
    view["notices"] = notices
    view["error"] = (
        [line for line in lines if line.strip()][-4:] if view["state"] == "failed" else []
    )
    view["answer"] = job.answer() if job.is_over else ""
    view |= _results_of(site, job)
    return view


def _results_of(site: Site, job: Job) -> dict[str, Any]:
    """Files that a finished job wrote: a plan, pictures, an adapter."""
    if job.state not in ("finished", "stopped"):
        return {"pictures": [], "file": ""}
    given = values_of(job.words)
    found: dict[str, Any] = {"pictures": [], "file": ""}
    if job.words[0] == "plan" and (file := site.inside(str(given["path"]))).is_file():
        plan = load_plan(file)
        found |= {"plan": plan_view(Subject(file.name, plan)), "file": site.shown(file)}
    if job.words[0] == "sample" and job.state == "finished":
        found["pictures"] = job.answer().split("\n")
    if job.words[0] == "weights":
        found["file"] = site.shown(site.inside(str(given["target"])))
    return found


@route("/stream", "WATCH")
def _watched(site: Site, asked: Asked) -> tuple[list[Path], Callable[[], bool]]:
    if found := site.jobs.find(asked.one("job")):
        files = [found.folder / name for name in (EVENTS, ANSWER, EXIT)]
        return files, lambda: found.is_over
    folder = site.inside(asked.one("run"))
    if not folder.is_dir() and _job_of(site, folder) is None:
        raise InvalidInput(f"{asked.one('run')} holds no run", hint="choose one of the list")
    files = [folder / name for name in (METRICS_FILE, REPORT_FILE, "previews", RUN_PLAN_FILE)]
    if job := _job_of(site, folder):
        files += [job.folder / name for name in (EVENTS, EXIT)]
    return files, lambda: run_state(site, folder)[0] not in ("waiting", "running")


# --- Machine -------------------------------------------------------------------------------------


@route("/")
def _open_first(site: Site, asked: Asked) -> Response:
    return RedirectResponse("/data", 303)


@route("/machine")
def _show_machine(site: Site, asked: Asked) -> Response:
    jobs = (job for job in site.jobs if job.words[0] == "probe" and job.state == "finished")
    probed = next(jobs, None)
    return site.render(
        "machine.html",
        page="machine",
        findings=autotune.doctor(),
        probed=probed.answer() if probed else "",
        gpus=autotune.list_gpus(),
        commands={"doctor": "autotune doctor", "probe": "autotune probe"},
    )


# --- Data ----------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _walk(root: Path, stamp: int) -> dict[str, list[Path]]:
    """Folders of images, models and runs, YAML files and other configurations below a root."""
    found: dict[str, list[Path]] = {name: [] for name in ("data", "model", "run", "plan", "other")}
    for place, folders, names in islice(os.walk(root), MAX_PLACES):
        here, is_deep = Path(place), len(Path(place).relative_to(root).parts) >= MAX_DEPTH
        folders[:] = [] if is_deep else sorted(n for n in folders if not n.startswith("."))
        if "model_index.json" in names:
            found["model"].append(here)
            folders.clear()
        elif RUN_PLAN_FILE in names:
            found["run"].append(here)
            folders.clear()
        else:
            if any(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in names):
                found["data"].append(here)
            found["plan"] += [here / n for n in names if n.endswith((".yaml", ".yml"))]
            found["other"] += [here / n for n in names if n.endswith((".toml", ".json"))]
    return found


def places(site: Site, kind: str) -> list[Path]:
    """List what lies in the page's folders, by its kind."""
    found = [path for root in site.roots for path in _walk(root, int(time.time()) // 3)[kind]]
    return list(dict.fromkeys(found))


def _data_folder(site: Site, asked: Asked) -> Path | None:
    folders = places(site, "data")
    if name := asked.one("folder"):
        folder = site.inside(name)
        if not folder.is_dir():
            raise InvalidInput(f"there is no folder {name}", hint="choose one of the list")
        return folder
    return folders[0] if folders else None


@route("/data")
def _show_data(site: Site, asked: Asked) -> Response:
    folder = _data_folder(site, asked)
    items = read_captions(folder, site.has) if folder else []
    at = min(asked.number("from", 0), max(0, len(items) - 1)) // PAGE_SIZE * PAGE_SIZE
    return site.render(
        "data.html",
        page="data",
        folder=folder,
        folders=places(site, "data"),
        items=items[at : at + PAGE_SIZE],
        total=len(items),
        resolution=_last_asked(site).get("resolution", ""),
        captioned=sum(bool(item.caption) for item in items),
        start=at,
        size=PAGE_SIZE,
        undo=folder and last_edit(folder),
        undo_command=folder and command_text(["data", "undo", site.shown(folder)]),
        told=asked.one("told"),
    )


@route("/data/check")
def _check_data(site: Site, asked: Asked) -> Response:
    folder = site.inside(asked.one("folder"))
    if not folder.is_dir():
        raise InvalidInput(f"there is no folder {asked.one('folder')}", hint="reload the page")
    side = asked.number("resolution", 0)
    report = autotune.check_data(str(folder), resolution_px=side or None)
    ordered = sorted(report.problems, key=lambda one: SEVERITIES.get(one.kind, 3))
    flags = ["--resolution", str(side)] if side else []
    command = command_text(["data", "check", *flags, site.shown(folder)])
    words = {name: text.partition(" (")[0] for name, text in PROBLEMS.items()}
    return site.render(
        "check_part.html", report=report, problems=ordered[:200], words=words, command_text=command
    )


@route("/data/caption", "POST")
def _edit_caption(site: Site, asked: Asked) -> Response:
    name, folder, text = asked.one("name"), site.inside(asked.one("folder")), asked.one("caption")
    items = read_captions(folder, site.has)
    own = [item for item in items if item.media.name == name and not item.is_locked]
    if not own:
        raise InvalidInput(f"no caption of {name} can be edited", hint="reload the page")
    edit_captions(folder, own, lambda item: text, f"the caption of {name}")
    words = ["data", "caption", "--overwrite", f"--caption={text}", site.shown(own[0].media.path)]
    return site.render("saved_part.html", command=command_text(words))


@route("/data/replace", "POST")
def _replace_in_captions(site: Site, asked: Asked) -> Response:
    folder = site.inside(asked.one("folder"))
    trigger, find, replacement = (asked.one(name) for name in ("trigger", "find", "replacement"))
    if not trigger and not find:
        raise InvalidInput("both fields are empty", hint="fill in one of them")
    pairs = {find: replacement} if find else {}
    what = f"the trigger word {trigger}" if trigger else f"“{find}” by “{replacement}”"
    changed = edit_captions(
        folder,
        read_captions(folder, site.has),
        lambda item: reworded(item.caption, trigger=trigger, replacements=pairs),
        what,
    )
    told = f"{len(changed)} caption{'s' * (len(changed) != 1)} changed"
    return RedirectResponse(f"/data?folder={_quoted(str(folder))}&told={_quoted(told)}", 303)


@route("/data/undo", "POST")
def _undo(site: Site, asked: Asked) -> Response:
    def allow(name: str) -> Path:
        if Path(name).suffix.lower() not in CAPTION_SUFFIXES:
            raise InvalidInput(f"{name} is no caption", hint="edit it by hand")
        return site.inside(name)

    folder = site.inside(asked.one("folder"))
    told = f"taken back: {undo_edit(folder, allow)}"
    return RedirectResponse(f"/data?folder={_quoted(str(folder))}&told={_quoted(told)}", 303)


@route("/upload", "PUT")
def _upload_target(site: Site, asked: Asked) -> Path:
    folder, name = site.inside(asked.one("folder")), Path(asked.one("name")).name
    if not name or name.startswith(".") or Path(name).suffix.lower() not in UPLOADED:
        raise InvalidInput(f"{name or 'this'} is neither picture nor caption", hint="upload those")
    target = site.inside(folder / name)
    if os.path.lexists(folder / name):
        raise InvalidInput(f"{name} is there already", hint="rename one of the two")
    return target


@route("/thumb")
def _show_thumb(site: Site, asked: Asked) -> Response:
    path = site.inside(asked.one("path"))
    side = asked.number("side", THUMB_PX, 1024)
    kind, content, _ = reports.encode_picture(path, side, path.stat().st_mtime_ns)
    headers = {"cache-control": "private, max-age=600"}
    return Response(content, media_type=f"image/{kind}", headers=headers)


@route("/static/{name}")
def _show_static(site: Site, asked: Asked) -> Response:
    name, headers = asked.one("name"), {"cache-control": "private, max-age=3600"}
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        # What would add a style sheet for maps, which the policy refuses, finds it there already.
        script = re.sub(r'document\.getElementById\("[0-9a-f]{64}"\)', "true", get_plotlyjs())
        return Response(script, media_type="text/javascript", headers=headers)
    if name not in STATIC:
        raise InvalidInput(f"there is no {name}", hint="reload the page")
    text, _, _ = site.templates.loader.get_source(site.templates, name)
    return Response(text, media_type=STATIC[name], headers=headers)


# --- Plan ----------------------------------------------------------------------------------------


def _last_asked(site: Site) -> dict[str, Any]:
    """The values of the last plan that was asked for: the form and the check start from them."""
    last = next((job for job in site.jobs if job.words[0] == "plan"), None)
    return values_of(last.words) if last else {}


@route("/plan")
def _show_plan(site: Site, asked: Asked) -> Response:
    if name := asked.one("file"):
        file = site.inside(name)
        view = plan_view(Subject(file.name, load_plan(file)))
        return site.render("plan_file.html", page="plan", plan=view, file=site.shown(file))
    given = _last_asked(site)
    given |= {name: asked.one(name) for name in asked}
    choices = {one.name: one for one in _command("plan").get_params(click.Context(app))}
    fields = {name: _field(choices[name], given.get(name)) for name in FIELDS["plan"]}
    plans = [path for path in places(site, "plan") if _is_plan(path)]
    return site.render(
        "plan.html",
        page="plan",
        fields=fields,
        more=MORE,
        models=autotune.list_models(),
        folders={kind: [site.shown(p) for p in places(site, kind)] for kind in ("data", "model")},
        gpus=sorted(autotune.list_gpus(), key=lambda gpu: gpu.id),
        plans=[site.shown(path) for path in plans],
        jobs=[job for job in site.jobs if job.words[0] == "plan" and job.state != "draft"][:10],
    )


def _is_plan(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return b"frozen:" in file.read(1 << 20)
    except OSError:
        return False


def _field(one: click.Parameter, value: Any) -> dict[str, Any]:
    """Describe an option for a form: what the command line knows of it."""
    kind, default = one.type, getattr(one, "default", None)
    many = isinstance(value, tuple | list)
    text = "\n".join(map(_text, value)) if many else "" if value in (None, False) else _text(value)
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return {
        "name": one.name,
        "flag": max(one.opts, key=len),
        "help": getattr(one, "help", "") or "",
        "choices": list(kind.choices) if isinstance(kind, click.Choice) else [],
        "is_flag": isinstance(one, click.Option) and one.is_flag,
        "is_many": one.multiple if isinstance(one, click.Option) else False,
        "is_number": isinstance(kind, click.IntRange),
        "default": str(default) if plain else "",
        "value": text,
    }


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "=".join(map(str, value)) if isinstance(value, tuple) else str(value)


@route("/plan/known")
def _look_up(site: Site, asked: Asked) -> Response:
    """Find what was computed ahead for a published model on a card of the catalog: at once."""
    model, hardware = asked.one("model"), asked.one("hardware")
    found = None
    if model and hardware:
        rows = autotune.list_models(hardware)
        found = next((one for one in rows if model in (one.name, one.hub_id)), None)
    known = found.prediction if found else None
    told = ""
    if found and known and known.step_seconds and found.run_hours:
        ranges = partial(range_text, uncertainty=known.time_uncertainty, form=rough_seconds)
        told = (
            f"{found.name} should fit: up to {memory_text(known.run_memory_bytes)} of VRAM, "
            f"{ranges(found.image_seconds or 0.0)} an image, {ranges(3600 * found.run_hours)} for "
            "a run on 20 images with the model's usual settings."
        )
    elif found and known:
        told = f"{found.name} does not fit with its usual settings: try quality compact, or less."
    return site.render("known_part.html", told=told)


# --- Train ---------------------------------------------------------------------------------------


def _job_of(site: Site, folder: Path) -> Job | None:
    """The newest job that trains into a folder."""
    for job in site.jobs:
        output = values_of(job.words).get("output") if job.words[0] == "train" else None
        if output and Path(os.path.realpath(site.workspace / str(output))) == folder:
            return job
    return None


def run_state(site: Site, folder: Path) -> tuple[str, Job | None]:
    """Tell where a run stands, by its job and by its folder: it may be another terminal's."""
    job = _job_of(site, folder)
    if job and not job.is_over:
        return job.state, job
    if is_locked(folder / LOCK_FILE):
        return "running", None
    if (folder / REPORT_FILE).is_file():
        return "finished", job
    return job.state if job else "stopped", job


def _runs(site: Site) -> list[dict[str, Any]]:
    """All runs of the page's folders, and those that have written nothing yet; newest first."""
    folders = dict.fromkeys(places(site, "run"))
    for own in site.jobs:
        if own.words[0] == "train" and not own.is_over:
            output = str(values_of(own.words).get("output", ""))
            folders = {Path(os.path.realpath(site.workspace / output)): None, **folders}
    found = []
    for folder in folders:
        state, job = run_state(site, folder)
        row = {"folder": folder, "shown": site.shown(folder), "state": state, "job": job}
        found.append({**row, "changed": folder.stat().st_mtime if folder.exists() else 1e18})
    return sorted(found, key=lambda row: -float(row["changed"]))


@route("/train")
def _show_train(site: Site, asked: Asked) -> Response:
    runs = [row | _summary(row["folder"]) for row in _runs(site)]
    plans = [site.shown(path) for path in places(site, "plan") if _is_plan(path)]
    return site.render("train.html", page="train", runs=runs, plans=plans)


def _summary(folder: Path) -> dict[str, Any]:
    """A line of a run: model, steps, loss, speed and memory against the promise, a picture."""
    row: dict[str, Any] = {"model": "", "steps": "", "loss": "", "speed": "", "memory": ""}
    try:
        subject = reports.read_run(folder, 0)
    except AutotuneError:
        return row | {"picture": None}
    view, report, steps = run_view(subject), subject.report, subject.steps
    row["model"] = subject.plan.frozen.workload.model.name
    expected = subject.plan.frozen.expected
    if steps:
        row["steps"] = f"{steps[-1].step} of {steps[-1].num_steps}"
        row["loss"] = "{:.4f} → {:.4f}".format(*view["losses"])
        took, planned = view["step_seconds"], expected.step_seconds
        row["speed"] = f"{seconds_text(took)} (planned {seconds_text(planned)})"
    if report:
        used = memory_text(report.run_memory_bytes)
        row["memory"] = f"{used} (planned {memory_text(expected.run_memory_bytes)})"
    pictures = [
        folder / "sample_with_adapter.png",
        *sorted(folder.glob("previews/step-*.png"))[-1:],
    ]
    return row | {"picture": next((path for path in pictures if path.is_file()), None)}


@route("/run")
def _show_run(site: Site, asked: Asked) -> Response:
    folder = site.inside(asked.one("folder"))
    return site.render("run.html", page="train", **_run_values(site, folder))


@route("/run/live")
def _show_live_run(site: Site, asked: Asked) -> Response:
    return site.render("run_part.html", **_run_values(site, site.inside(asked.one("folder"))))


def _run_values(site: Site, folder: Path) -> dict[str, Any]:
    state, job = run_state(site, folder)
    values: dict[str, Any] = {"folder": folder, "shown": site.shown(folder), "state": state}
    values |= {"job": job, "run": None, "told": job_view(site, job) if job else None}
    if (folder / RUN_PLAN_FILE).is_file():
        values["run"] = run_view(reports.read_run(folder))
    elif job is None:
        raise InvalidInput(f"{values['shown']} holds no run", hint="choose one of the list")
    values["resume"] = ["train", "--output", values["shown"], "--resume"]
    values["resume_command"] = command_text(values["resume"])
    return values


# --- Results -------------------------------------------------------------------------------------


@route("/results")
def _show_results(site: Site, asked: Asked) -> Response:
    runs = [row | _summary(row["folder"]) for row in _runs(site) if row["state"] == "finished"]
    chosen = [site.inside(name) for name in asked.many("run")][:4]
    folder = site.inside(asked.one("folder")) if asked.one("folder") else None
    if folder and not (folder / RUN_PLAN_FILE).is_file():
        raise InvalidInput(f"{asked.one('folder')} holds no run", hint="choose one of the list")
    folder = folder or (chosen[0] if chosen else runs[0]["folder"] if runs else None)
    return site.render(
        "results.html",
        page="results",
        runs=runs,
        marked=chosen,
        chosen=[run_view(reports.read_run(one)) for one in chosen] if len(chosen) > 1 else [],
        folder=folder,
        samples=_samples(folder) if folder else [],
        downloads=_downloads(folder) if folder else [],
        formats=FORMATS,
    )


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Pictures that were sampled from a run, in rows of the same prompt and seed."""
    rows: dict[tuple[str, str], list[tuple[float, Path]]] = {}
    for path in sorted((folder / "samples").glob("*.png"))[:400]:
        try:
            with open_image(path) as image:
                facts = image.info
        except OSError:
            continue
        key = str(facts.get("prompt", path.stem)), str(facts.get("seed", ""))
        strength = str(facts.get("strength", "1"))
        number = float(strength) if re.fullmatch(r"\d{1,3}(\.\d{1,6})?", strength) else 1.0
        rows.setdefault(key, []).append((number, path))
    return [
        {"prompt": prompt, "seed": seed, "pictures": sorted(pictures)}
        for (prompt, seed), pictures in rows.items()
    ]


def _downloads(folder: Path) -> list[tuple[str, str, Path | None]]:
    files = {"diffusers": folder / ADAPTER_FILE}
    files |= {name: folder / f"{name}_lora_weights.safetensors" for name in ("comfyui", "kohya")}
    return [(n, FORMATS[n], file if file.is_file() else None) for n, file in files.items()]


@route("/download")
def _download(site: Site, asked: Asked) -> Response:
    path = site.inside(asked.one("path"))
    if path.suffix != ".safetensors" or not path.is_file():
        raise InvalidInput("only adapters are downloaded", hint="train one first")
    name = f"{path.parent.name}-{path.name}"
    return FileResponse(path, media_type="application/octet-stream", filename=name)


# --- Compare, import, records --------------------------------------------------------------------


@route("/compare")
def _show_compare(site: Site, asked: Asked) -> Response:
    jobs = [job for job in site.jobs if job.words[0] == "compare"]
    data = [site.shown(path) for path in places(site, "data")]
    values: dict[str, Any] = {"models": autotune.list_models(), "files": _listings(site)}
    return site.render("compare.html", page="compare", data=data, jobs=jobs[:10], **values)


def _listings(site: Site) -> list[str]:
    return [site.shown(path) for path in places(site, "plan") if not _is_plan(path)]


@route("/import")
def _show_import(site: Site, asked: Asked) -> Response:
    jobs = [job for job in site.jobs if job.words[0] == "audit"]
    files = [*_listings(site), *(site.shown(path) for path in places(site, "other"))]
    gpus = sorted(autotune.list_gpus(), key=lambda gpu: gpu.id)
    return site.render("import.html", page="import", files=files, gpus=gpus, jobs=jobs[:10])


@route("/records")
def _show_records(site: Site, asked: Asked) -> Response:
    from autotune import records

    found = records.list_records()
    shown = [
        (one, seconds_text(one.step_seconds), memory_text(one.peak_memory_bytes)) for one in found
    ]
    return site.render("records.html", page="records", records=shown)
