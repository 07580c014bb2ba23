"""Pages of what runs and has run: commands as they go on, training, results."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.responses import FileResponse, RedirectResponse, Response

from autotune import events
from autotune.cli import forms
from autotune.cli.jobs import ANSWER, EVENTS, EXIT, STOPPING, Job, is_locked
from autotune.cli.server import Asked, Site, route
from autotune.data.pixels import open_image
from autotune.errors import AutotuneError, InvalidInput
from autotune.plan.candidate import TrialResult
from autotune.plan.file import RUN_PLAN_FILE, load_plan
from autotune.report import files as reports, run
from autotune.report.page import Subject, plan_view, run_view, trials_chart
from autotune.report.text import memory_text, seconds_text
from autotune.train.folder import ADAPTER_FILE, LOCK_FILE, REPORT_FILE
from autotune.train.metrics import METRICS_FILE
from autotune.weights.files import read_header

ADAPTED = re.compile(r"[._](?:lora|lokr)_")  # in the names of an adapter's tensors
FORMATS = {"diffusers": "diffusers", "comfyui": "ComfyUI", "kohya": "Kohya"}


@route("/command")
def _show_command(site: Site, asked: Asked) -> Response:
    name = asked.one("command")
    words = forms.build_words(site, name, asked)
    return site.render("command_part.html", command=forms.command_text(words))


@route("/jobs", "POST")
def _start_job(site: Site, asked: Asked) -> Response:
    name = asked.one("command")
    words = forms.build_words(site, name, asked)
    job = site.jobs.start(words, is_queued=forms.is_queued(words))
    return RedirectResponse(_place_of(site, job), 303)


def _place_of(site: Site, job: Job) -> str:
    if job.words[0] == "train":
        return f"/run?{urlencode({'folder': forms.values_of(job.words).get('output', '')})}"
    return f"/jobs/{job.name}"


@route("/jobs/{name}")
def _show_job(site: Site, asked: Asked) -> Response:
    job = _find_job(site, asked)
    pages = {"sample": "results", "weights": "results", "probe": "machine", "audit": "import"}
    page = pages.get(job.words[0], job.words[0])
    return site.render("job.html", page=page, **job_view(site, job))


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


def job_view(site: Site, job: Job) -> dict[str, Any]:
    """Gather what a job told: where it stands, its trials, its result, or why it failed."""
    told, lines = job.told()
    view: dict[str, Any] = {"job": job, "state": job.state, "status": "", "done": 0, "total": 0}
    view |= {"command": forms.command_text(job.words), "plan": None}
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
                view |= {"status": "training: step", "done": event.step, "total": event.num_steps}
            case events.TrialFinished():
                trials.append(event.result)
                view |= {"done": len(trials), "status": "trying settings"}
                if len(trials) >= view["total"]:
                    view |= {"total": 0, "status": "trying the best for longer"}
    if (job.folder / STOPPING).exists():
        view |= {"status": "stopping, after what it must still write", "total": 0}
    total = view["total"] if trials else 0
    view["trials"] = [run.trial_text(at, total, one) for at, one in enumerate(trials, 1)]
    view["chart"] = trials_chart(trials, batch)
    view["notices"] = notices
    end = [line for line in lines if line.strip()][-4:]
    view["error"] = end if view["state"] == "failed" else []
    view["answer"] = job.answer() if job.is_over else ""
    view |= _results_of(site, job)
    return view


def _results_of(site: Site, job: Job) -> dict[str, Any]:
    given = forms.values_of(job.words)
    found: dict[str, Any] = {"pictures": [], "file": "", "run_folder": given.get("run_folder", "")}
    if job.state not in ("finished", "stopped"):
        return found
    if job.words[0] == "plan" and (file := site.inside(str(given["path"]))).is_file():
        plan = load_plan(file)
        found |= {"plan": plan_view(Subject(file.name, plan)), "file": site.shown(file)}
    if job.words[0] == "sample" and job.state == "finished":
        found["pictures"] = job.answer().split("\n")
    if job.words[0] == "weights":
        target = site.inside(str(given["target"]))
        found |= {"file": site.shown(target), "run_folder": site.shown(target.parent)}
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


# --- Train ---------------------------------------------------------------------------------------


def _job_of(site: Site, folder: Path) -> Job | None:
    found = []
    for job in site.jobs:
        output = forms.values_of(job.words).get("output") if job.words[0] == "train" else None
        if output and Path(os.path.realpath(site.workspace / str(output))) == folder:
            found.append(job)
    return max(found, key=lambda job: job.state == "running", default=None)


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
    folders = dict.fromkeys(forms.places(site, "run"))
    for own in site.jobs:
        if own.words[0] == "train" and not own.is_over:
            output = str(forms.values_of(own.words).get("output", ""))
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
    plans = [site.shown(path) for path in forms.places(site, "plan") if forms.is_plan(path)]
    return site.render("train.html", page="train", runs=runs, plans=plans)


def _summary(folder: Path) -> dict[str, Any]:
    """A line of a run: model, steps, loss, speed and memory against the promise, a picture."""
    row: dict[str, Any] = {"model": "", "steps": "", "loss": "", "speed": "", "memory": ""}
    try:
        subject = reports.read_run(folder, 0)
    except AutotuneError:
        return row | {"picture": None}
    view, report, last = run_view(subject), subject.report, subject.steps.last
    row["model"] = subject.plan.frozen.workload.model.name
    expected = subject.plan.frozen.expected
    if last:
        row["steps"] = f"{last.step} of {last.num_steps}"
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
    if site.inside(folder / RUN_PLAN_FILE).is_file():
        values["run"] = run_view(reports.read_run(folder))
    elif job is None:
        raise InvalidInput(f"{values['shown']} holds no run", hint="choose one of the list")
    values["resume"] = ["train", "--output", values["shown"], "--resume"]
    values["resume_command"] = forms.command_text(values["resume"])
    return values


# --- Results -------------------------------------------------------------------------------------


@route("/results")
def _show_results(site: Site, asked: Asked) -> Response:
    runs = [row | _summary(row["folder"]) for row in _runs(site) if row["state"] == "finished"]
    chosen = [site.inside(Path(name) / RUN_PLAN_FILE).parent for name in asked.many("run")][:4]
    folder = site.inside(asked.one("folder")) if asked.one("folder") else None
    if folder and not site.inside(folder / RUN_PLAN_FILE).is_file():
        raise InvalidInput(f"{asked.one('folder')} holds no run", hint="choose one of the list")
    folder = folder or (chosen[0] if chosen else runs[0]["folder"] if runs else None)
    last = next((job for job in site.jobs if job.words[0] == "sample"), None)
    views = [(run_view(reports.read_run(one)), _samples(site, one)) for one in chosen]
    return site.render(
        "results.html",
        page="results",
        runs=runs,
        marked=chosen,
        chosen=views if len(views) > 1 else [],
        report=forms.command_text(["report", *map(site.shown, chosen)]),
        last=forms.values_of(last.words) if last else {},
        folder=folder,
        samples=_samples(site, folder) if folder else [],
        downloads=_downloads(site, folder) if folder else [],
        formats=FORMATS,
    )


def _samples(site: Site, folder: Path) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], list[tuple[float, Path]]] = {}
    for path in filter(site.has, sorted((folder / "samples").glob("*.png"))[:400]):
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


def _downloads(site: Site, folder: Path) -> Iterator[tuple[str, str, Path | None, str]]:
    """Tell for each format its file if it is there, and the command that writes it."""
    for name, title in FORMATS.items():
        file = folder / f"{name}_lora_weights.safetensors"
        file = folder / ADAPTER_FILE if name == "diffusers" else file
        asked = Asked(run_folder=[site.shown(folder)], to=[name])
        words = forms.build_words(site, "weights convert", asked)
        yield name, title, file if file.is_file() else None, forms.command_text(words)


@route("/download")
def _download(site: Site, asked: Asked) -> Response:
    path = site.inside(asked.one("path"))
    if not any(ADAPTED.search(name) for name in read_header(path).by_name):
        raise InvalidInput("only adapters are downloaded", hint="train one first")
    name = f"{path.parent.name}-{path.name}"
    return FileResponse(path, media_type="application/octet-stream", filename=name)
