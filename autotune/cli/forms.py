"""Forms of the pages: what they offer to choose from, and the commands that they ask for."""

import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import click

import autotune
from autotune.cli.commands import app
from autotune.cli.options import GIVEN
from autotune.cli.server import Asked, Site
from autotune.data.dataset import list_folders
from autotune.data.media import list_contents
from autotune.data.pixels import IMAGE_SUFFIXES
from autotune.errors import InvalidInput
from autotune.plan.file import RUN_PLAN_FILE, load_plan
from autotune.plan.job import each_place
from autotune.system.files import open_regular
from autotune.train.folder import ADAPTER_FILE

ON_DEVICE = ("probe", "train", "sample")  # and plans for this machine: one at a time
MAX_DEPTH, MAX_PLACES = 4, 4000  # of folders that are looked through
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
    "sample": ("run_folder", "prompt", "count", "seed", "num_steps", "strengths"),
    "compare": (*FIRST[:2], *FIRST[3:6], "max_cost", "max_hours", "prices"),
    "audit": ("config_file", "hardware"),
    "data check": ("data", "resolution"),
    "data caption": ("place", "trigger", "replacements"),
    "weights convert": ("source", "target", "to", "overwrite"),
}
PATHS = {"data", "base", "control", "output", "path", "plan", "run_folder", "config_file"}
PATHS |= {"source", "target", "prices", "place"}
ALONE = ("model", "base", "vae", "from_adapter", "training_adapter", "control", "validation")


def find_command(name: str) -> click.Command:
    """Find a command by its words."""
    command: Any = app
    for word in name.split():
        command = command.commands[word]
    return command  # type: ignore[no-any-return]


def build_words(site: Site, name: str, asked: Asked) -> list[str]:
    """Write the command that a form asks for. Raises InvalidInput for a path outside."""
    if name not in FIELDS:
        raise InvalidInput(f"the page has no command {name}", hint="use the terminal")
    _complete(site, name, asked)
    command = find_command(name)
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
        path = site.inside(value)
        if name == "data":
            _require_inside(site, _folders_of(site, value))
        if name == "config_file":
            _require_inside(site, _files_of(site, _named_by(site, path)))
        plan = path if name == "plan" else path / RUN_PLAN_FILE
        if plan.is_file():
            _require_inside(site, _files_of(site, dict(load_plan(plan).job)))
        return site.shown(path)
    if name == "hardware" and value not in {gpu.id for gpu in autotune.list_gpus()}:
        raise InvalidInput(f"the catalog has no {value}", hint="choose a card from the list")
    if name == "optimizer" and ":" in value:
        raise InvalidInput("a class of another package is loaded", hint="use the terminal")
    if name == "model" and is_path(site, value):
        return site.shown(site.inside(value))
    if name == "validation" and not value.endswith("%"):
        return site.shown(site.inside(value))
    return value


def is_path(site: Site, name: str | Path) -> bool:
    """Tell a path from the name of a model."""
    return os.path.lexists(site.workspace / name) or str(name).startswith(("/", ".", "~"))


def _require_inside(site: Site, names: Iterable[str | Path]) -> None:
    for name in names:
        if is_path(site, name):
            site.inside(name)


def _named_by(site: Site, file: Path) -> dict[str, Any]:
    """Return the existing files that another trainer's configuration names: only they are read.
    Raises InvalidInput for a further configuration outside the folders."""
    read = autotune.import_config(file, allow=site.inside)
    named = {**read.options, "model": read.model, "data": read.data}
    return {
        name: text
        for name, text in named.items()
        if isinstance(text, str) and (text[:1] == "~" or os.path.lexists(site.workspace / text))
    }


def _files_of(site: Site, job: Mapping[str, Any]) -> Iterator[str | Path]:
    """Yield what a job's values, which anybody may have written, would have a command read."""
    yield from filter(None, (*map(job.get, ALONE), *job.get("text_encoders", ())))
    for place in each_place(job.get("data") or ()):
        yield from _folders_of(site, place)


def _folders_of(site: Site, place: str) -> Iterator[str | Path]:
    """Yield the folders of a job's data, which a file may list."""
    for folder in list_folders(site.inside(place)):
        for own in filter(None, (folder.path, folder.control)):
            yield own
            yield from filter(os.path.islink, list_contents(Path(own)).files)


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command's words give, by name; none if not understood."""
    name = " ".join(words[:2]) if " ".join(words[:2]) in FIELDS else words[0]
    if name not in FIELDS:
        return {}
    command = find_command(name)
    try:
        context = command.make_context(name, [*words[len(name.split()) :]], resilient_parsing=True)
    except (click.ClickException, ValueError):
        return {}
    given = context.params.items()
    return {name: v for name, v in given if context.get_parameter_source(name) in GIVEN}


def is_queued(words: Sequence[str]) -> bool:
    """Tell if a command waits until those before it have ended."""
    return words[0] in ON_DEVICE or (words[0] == "plan" and "--hardware" not in words)


def command_text(words: Sequence[str]) -> str:
    """Write the command as a shell takes it."""
    return shlex.join(["autotune", *words])


def _complete(site: Site, name: str, asked: Asked) -> None:
    """Name the files of a command that the form leaves open, as no command asks twice."""
    if name == "plan" and not asked.one("path"):
        asked["path"] = [_unused(site, "plan", ".yaml")]
    if name == "train" and not asked.one("output"):
        asked["output"] = [_unused(site, f"runs/{Path(asked.one('plan', 'run')).stem}", "")]
    if name == "data caption":
        asked["place"], find = [asked.one("folder")], asked.one("find")
        asked["replacements"] = [f"{find}={asked.one('replacement')}"] * bool(find)
    if name == "weights convert":
        asked["source"] = [f"{asked.one('run_folder')}/{ADAPTER_FILE}"]
        target = f"{asked.one('to')}_lora_weights.safetensors"
        asked["target"], asked["overwrite"] = [f"{asked.one('run_folder')}/{target}"], ["on"]


def _unused(site: Site, stem: str, suffix: str) -> str:
    awaited = {word for job in site.jobs if not job.is_over for word in job.words}
    names = (f"{stem}{'' if number == 1 else f'-{number}'}{suffix}" for number in range(1, 10**6))
    free = (name for name in names if not os.path.lexists(site.workspace / name))
    return next(name for name in free if name not in awaited)


@lru_cache(maxsize=8)
def find_places(root: Path, stamp: int) -> dict[str, list[Path]]:
    """Find folders of images, models and runs, and configurations below a root."""
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
    found = [path for root in site.roots for path in find_places(root, int(time.time()) // 3)[kind]]
    return list(dict.fromkeys(found))


def is_plan(path: Path) -> bool:
    """Tell a plan from other YAML files by its beginning."""
    try:
        with open_regular(path) as file:
            return b"frozen:" in file.read(1 << 20)
    except OSError:
        return False
