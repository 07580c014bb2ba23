"""Counts the files that an object passes through: those in which a function receives or returns it.

    python benchmarks/walks.py             traces a plan and a run of the small world, prints each
    walk python benchmarks/walks.py --write     and writes the walks into CONTRIBUTING.md

A hardware profile and a candidate are known by their classes, a caption and a model's name by texts
that occur nowhere else. Child processes are traced too: a `sitecustomize` installs the same
profiler in each.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from autotune.demo.lesson import TAUGHT_REPEATS, taught_scenes, write_images

ROOT = Path(__file__).resolve().parents[1]
CAPTION, MODEL = "qzvx marker", "~/qzvx-model"  # which is not the folder that it means
HOOK = """
import os, sys, threading
root, out, caption, model = os.environ["WALKS"].split("|")
files, seen = {}, set()

def kind_of(value):
    name = type(value).__name__
    if name in ("HardwareProfile", "Candidate"):
        return name
    if isinstance(value, (list, tuple)) and 0 < len(value) < 50:
        return kind_of(value[0])
    text = model if name == "ModelRef" else str(value) if name in ("str", "PosixPath") else ""
    if text == model:
        return "model name"
    return "caption" if caption in text and len(text) < 200 else None

def see(file, value):
    kind = kind_of(value)
    if kind and (kind, file) not in seen:
        seen.add((kind, file))
        with open(out, "a") as log:
            log.write(f"{kind}\\t{file}\\n")

def profile(frame, event, value):
    code = frame.f_code
    if code not in files:
        path = code.co_filename
        is_ours = path.startswith(root) and code.co_name != "<module>"
        files[code] = path[len(root):].lstrip("/") if is_ours else ""
    if not (file := files[code]):
        return
    if event == "return":
        see(file, value)
    elif event == "call":
        values = frame.f_locals
        stars = bool(code.co_flags & 4) + bool(code.co_flags & 8)
        for name in code.co_varnames[:code.co_argcount + code.co_kwonlyargcount + stars]:
            see(file, values.get(name))

threading.setprofile(profile)
sys.setprofile(profile)
"""
TITLES = {
    "HardwareProfile": "A hardware profile",
    "Candidate": "A candidate",
    "caption": "A caption",
    "model name": "A model's name",
}
BEGIN, END = "<!-- walks: written by benchmarks/walks.py -->", "<!-- end of walks -->"


def trace(folder: Path) -> dict[str, list[str]]:
    """Plan and train in `folder` under the profiler; return the files of each walk, sorted."""
    images, plan, seen = (folder / name for name in ("images", "plan.yaml", "seen"))
    shutil.copytree(ROOT / "autotune/demo/small_world", folder / MODEL.removeprefix("~/"))
    scenes = taught_scenes()
    write_images(images, scenes, [scene.draw() for scene in scenes], repeats=TAUGHT_REPEATS)
    for text in images.glob("*.txt"):
        text.write_text(f"{CAPTION} {text.read_text()}")
    seen.touch()
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'hook'}:{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",  # a GPU has walks of its own
        "WALKS": "|".join(map(str, (ROOT / "autotune", seen, CAPTION, MODEL))),
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
    }
    options = shlex.split(
        "--resolution 64 --steps 8 --batch-size 8 --search-time 30 --max-trials 1"
    )
    asked = ["--model", MODEL, "--data", images, *options, "-o", plan]
    for words in (["plan", *asked, "--run-output", folder / "result"], ["train", plan]):
        command = [sys.executable, "-m", "autotune", "--quiet", *map(str, words)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    walks: dict[str, list[str]] = {kind: [] for kind in TITLES}
    for line in sorted(set(seen.read_text().splitlines())):
        kind, file = line.split("\t")
        walks[kind].append(file)
    return walks


def as_markdown(walks: dict[str, list[str]]) -> str:
    """The walks as the list in CONTRIBUTING.md."""
    lines = [
        textwrap.fill(
            f"- **{title}** ({len(walks[kind])} files): {', '.join(walks[kind])}",
            width=118,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for kind, title in TITLES.items()
    ]
    return "\n".join([BEGIN, *lines, END])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = as_markdown(trace(Path(name)))
    print(found)
    if "--write" in sys.argv:
        page = ROOT / "CONTRIBUTING.md"
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(before + found + rest.partition(END)[2])
