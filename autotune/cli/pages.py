"""The pages of `autotune ui`: each asks the public API and fills a template; long work is a command
of its own, whose words are shown.
"""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click
from starlette.responses import RedirectResponse, Response

import autotune
from autotune.cli import forms, run_pages  # noqa: F401 - the latter adds its routes
from autotune.cli.commands import app, known_answer
from autotune.cli.server import Asked, Site, route
from autotune.data import captions
from autotune.data.media import CAPTION_SUFFIXES
from autotune.data.pixels import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from autotune.errors import InvalidInput
from autotune.plan.file import load_plan
from autotune.report import files as reports, machine, page
from autotune.report.text import memory_text, seconds_text

STATIC = {"page.css": "text/css", "page.js": "text/javascript", "app.css": "text/css"}
STATIC |= {"app.js": "text/javascript", "htmx.min.js": "text/javascript"}
PAGE_SIZE = 60  # pictures on a page
THUMB_PX = 320
WORDS_AS_PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 190 190"><text x="95" y="100" '
    'text-anchor="middle" font-family="sans-serif" font-size="15" fill="#7a838e">{}</text></svg>'
)
UPLOADED = {*IMAGE_SUFFIXES, *CAPTION_SUFFIXES, ".jsonl", ".csv", ".yaml", ".yml", ".toml", ".json"}
SEVERITIES = {"broken": 0, "tiny": 1, "short": 1, "control": 1, "mask": 1, "captionless": 2}


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
    )


# --- Data ----------------------------------------------------------------------------------------


def _data_folder(site: Site, asked: Asked) -> Path | None:
    folders = forms.places(site, "data")
    if name := asked.one("folder"):
        folder = site.inside(name)
        if not folder.is_dir():
            raise InvalidInput(f"there is no folder {name}", hint="choose one of the list")
        return folder
    return folders[0] if folders else None


@route("/data")
def _show_data(site: Site, asked: Asked) -> Response:
    folder = _data_folder(site, asked)
    items = captions.read_captions(folder, site.has) if folder else []
    at = min(asked.number("from", 0), max(0, len(items) - 1)) // PAGE_SIZE * PAGE_SIZE
    return site.render(
        "data.html",
        page="data",
        folders=forms.places(site, "data"),
        items=items[at : at + PAGE_SIZE],
        total=len(items),
        resolution=_last_asked(site).get("resolution", ""),
        captioned=sum(bool(item.caption) for item in items),
        start=at,
        size=PAGE_SIZE,
        told=asked.one("told"),
        **(_undo_values(site, folder) if folder else {"folder": None}),
    )


def _undo_values(site: Site, folder: Path, command: str = "") -> dict[str, Any]:
    undo = forms.command_text(["data", "undo", site.shown(folder)])
    last = captions.last_edit(folder)
    return {"undo": last, "undo_command": undo, "folder": folder, "command": command}


@route("/data/check")
def _check_data(site: Site, asked: Asked) -> Response:
    folder = _data_folder(site, asked)
    asked |= {"data": [str(folder)]}
    words = forms.build_words(site, "data check", asked)
    report = autotune.check_data(str(folder), resolution=asked.one("resolution") or None)
    ordered = sorted(report.problems, key=lambda one: SEVERITIES.get(one.kind, 3))
    kinds = {name: text.partition(" (")[0] for name, text in machine.PROBLEMS.items()}
    values: dict[str, Any] = {"report": report, "problems": ordered[:200], "kinds": kinds}
    return site.render("check_part.html", command=forms.command_text(words), **values)


@route("/data/caption", "POST")
def _edit_caption(site: Site, asked: Asked) -> Response:
    name, folder, text = asked.one("name"), site.inside(asked.one("folder")), asked.one("caption")
    items = captions.read_captions(folder, site.has)
    own = [item for item in items if item.media.name == name]
    if why := own[0].locked if own else "it is not there any more":
        raise InvalidInput(f"the caption of {name} is not edited: {why}", hint="reload the page")
    captions.edit_captions(folder, own, lambda item: text, f"the caption of {name}")
    words = ["data", "caption", "--overwrite", f"--caption={text}", site.shown(own[0].media.path)]
    return site.render("saved_part.html", **_undo_values(site, folder, forms.command_text(words)))


@route("/data/replace", "POST")
def _replace_in_captions(site: Site, asked: Asked) -> Response:
    folder = site.inside(asked.one("folder"))
    trigger, find, replacement = (asked.one(name) for name in ("trigger", "find", "replacement"))
    if not trigger and not find:
        raise InvalidInput("both fields are empty", hint="fill in one of them")
    pairs = {find: replacement} if find else {}
    what = f"the trigger word {trigger}" if trigger else f"“{find}” by “{replacement}”"
    items = captions.read_captions(folder, site.has)
    changed = captions.edit_captions(
        folder,
        items,
        lambda item: captions.reworded(item.caption, trigger=trigger, replacements=pairs),
        what,
    )
    told = f"{len(changed)} caption{'s' * (len(changed) != 1)} changed"
    return _back_to(folder, "; ".join(filter(None, (told, captions.tell_unread(items)))))


def _back_to(folder: Path, told: str) -> Response:
    return RedirectResponse(f"/data?{urlencode({'folder': folder, 'told': told})}", 303)


@route("/data/undo", "POST")
def _undo(site: Site, asked: Asked) -> Response:
    def allow(name: str) -> Path:
        if Path(name).suffix.lower() not in CAPTION_SUFFIXES:
            raise InvalidInput(f"{name} is no caption", hint="edit it by hand")
        return site.inside(name)

    folder = site.inside(asked.one("folder"))
    return _back_to(folder, f"taken back: {captions.undo_edit(folder, allow)}")


@route("/upload", "PUT")
def _upload_target(site: Site, asked: Asked) -> Path:
    folder, name = site.inside(asked.one("folder")), Path(asked.one("name")).name
    is_hidden = any(part.startswith(".") for part in (*Path(site.shown(folder)).parts, name))
    if not name or is_hidden or Path(name).suffix.lower() not in UPLOADED:
        raise InvalidInput(f"{name or 'this'} is neither picture nor caption", hint="upload those")
    target = site.inside(folder / name)
    if os.path.lexists(folder / name):
        raise InvalidInput(f"{name} is there already", hint="rename one of the two")
    forms.find_places.cache_clear()  # the page that is loaded next must know it
    return target


@route("/thumb")
def _show_thumb(site: Site, asked: Asked) -> Response:
    path = site.inside(asked.one("path"))
    side = asked.number("side", THUMB_PX, 1024) or THUMB_PX
    try:
        kind, content, _ = reports.encode_picture(path, side, path.stat().st_mtime_ns)
    except InvalidInput:
        if path.suffix.lower() not in {*IMAGE_SUFFIXES, *VIDEO_SUFFIXES}:
            raise
        words = "cannot be read" if path.suffix.lower() in IMAGE_SUFFIXES else "a clip"
        kind, content = "svg+xml", WORDS_AS_PICTURE.format(words).encode()
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
    return forms.values_of(last.words) if last else {}


@route("/plan")
def _show_plan(site: Site, asked: Asked) -> Response:
    if name := asked.one("file"):
        file = site.inside(name)
        view = page.plan_view(page.Subject(file.name, load_plan(file)))
        return site.render("plan_file.html", page="plan", plan=view, file=site.shown(file))
    given = _last_asked(site)
    given |= {name: asked.one(name) for name in asked}
    choices = {one.name: one for one in forms.find_command("plan").get_params(click.Context(app))}
    fields = {name: _field(choices[name], given.get(name)) for name in forms.FIELDS["plan"]}
    plans = [path for path in forms.places(site, "plan") if forms.is_plan(path)]
    return site.render(
        "plan.html",
        page="plan",
        fields=fields,
        more=forms.MORE,
        num_given=sum(bool(fields[name]["value"]) for name in forms.MORE),
        models=autotune.list_models(),
        folders={
            kind: [site.shown(p) for p in forms.places(site, kind)] for kind in ("data", "model")
        },
        gpus=sorted(autotune.list_gpus(), key=lambda gpu: gpu.id),
        plans=[site.shown(path) for path in plans],
        jobs=[job for job in site.jobs if job.words[0] == "plan" and job.state != "draft"][:10],
    )


def _field(one: click.Parameter, value: Any) -> dict[str, Any]:
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
    told = "" if forms.is_path(site, hardware) else known_answer(model, hardware)
    return site.render("known_part.html", told=told)


# --- Compare, import, records --------------------------------------------------------------------


@route("/compare")
def _show_compare(site: Site, asked: Asked) -> Response:
    jobs = [job for job in site.jobs if job.words[0] == "compare"]
    data = [site.shown(path) for path in forms.places(site, "data")]
    values: dict[str, Any] = {"models": autotune.list_models(), "files": _listings(site)}
    return site.render("compare.html", page="compare", data=data, jobs=jobs[:10], **values)


def _listings(site: Site) -> list[str]:
    return [site.shown(path) for path in forms.places(site, "plan") if not forms.is_plan(path)]


@route("/import")
def _show_import(site: Site, asked: Asked) -> Response:
    jobs = [job for job in site.jobs if job.words[0] == "audit"]
    files = [*_listings(site), *(site.shown(path) for path in forms.places(site, "other"))]
    gpus = sorted(autotune.list_gpus(), key=lambda gpu: gpu.id)
    chosen = f"{asked.one('folder')}/{asked.one('file')}"
    values: dict[str, Any] = {"files": files, "chosen": chosen, "gpus": gpus}
    return site.render("import.html", page="import", jobs=jobs[:10], **values)


@route("/records")
def _show_records(site: Site, asked: Asked) -> Response:
    from autotune import records

    found = records.list_records()
    shown = [
        (one, seconds_text(one.step_seconds), memory_text(one.peak_memory_bytes)) for one in found
    ]
    return site.render("records.html", page="records", records=shown)
