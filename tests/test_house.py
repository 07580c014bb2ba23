"""Rules for the whole package: imports, patterns, its wheel, and how far objects walk."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from autotune.interop.files import KEY, OPTION, SHELLS
from autotune.report.text import without_logins

ROOT = Path(__file__).parents[1]


def test_every_room_has_a_layer():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    rooms = {file.parent.name for file in (ROOT / "autotune").glob("*/__init__.py")}
    modules = {file.stem for file in (ROOT / "autotune").glob("*.py")} - {"__init__"}
    lines = [line for each in tools["importlinter"]["contracts"] for line in each.get("layers", ())]
    layers = {name for line in lines for name in line.split(" | ")}
    assert layers == {f"autotune.{name}" for name in rooms | modules}


def test_every_folder_of_modules_is_package():
    """The contracts on imports do not see modules in a folder without an `__init__.py`."""
    folders = {file.parent for file in (ROOT / "autotune").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


UNITS = *"a1 (", "a:", "a:/", "-a", "_a", "a.", "a/", "//", "a,", "a\n", '"', "a=", "a@", "$a", "0."
USE = re.compile(r"\b([A-Z_]{3,40})\.(match|fullmatch|search|sub|split|find\w+)\(")


def uses_of_patterns():
    tables = [f"(?m){one}" for one in (KEY, OPTION)]
    for shell in SHELLS.values():
        tables += [shell.variable, *(rf"(?im)^[ \t]*@?{one}" for one in shell.rewrites)]
    yield from (("files.py", one, "findall") for one in tables)
    for file in (ROOT / "autotune").rglob("*.py"):
        named = {}
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Assign(
                    [ast.Name(name)],
                    ast.Call(ast.Attribute(_, "compile"), [ast.Constant(str(text)), *_]),
                ):
                    named[name] = text
                case ast.Call(ast.Attribute(ast.Name("re"), use), [ast.Constant(str(text)), *_]):
                    if use != "compile":
                        yield file.name, text, use
        for found in USE.finditer(file.read_text()):
            if found[1] in named:
                yield file.name, named[found[1]], found[2]


@pytest.mark.parametrize("size", [12_000, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_patterns_are_never_slow(size):
    """On what a stranger wrote, time that grows with the square of its length has no end."""
    slow = set()
    for file, pattern, use in sorted(set(uses_of_patterns())):
        if file in ("rules.py", "names.py"):  # they read the package's own tables
            continue
        meets = getattr(re.compile(pattern), use if use.endswith("match") else "findall")
        sizes, units = sorted({400, 2000, 12_000, size}), UNITS[:: 1 if size < 1 << 20 else 4]
        rows = (unit * (n // len(unit) // 2) for unit in units for n in sizes)
        for text in (f"{row} {row}\0" for row in rows):  # what ends a name, and what does not
            began = time.process_time()
            meets(text)
            if time.process_time() - began > 0.1 + 5 * len(text) / 2**20:
                slow.add((file, pattern))
                break
    assert slow == set()


def test_messages_hide_logins_in_linear_time():
    began = time.process_time()
    for unit in UNITS:
        without_logins(unit * 50_000)
    assert time.process_time() - began < 10
    hidden = "s3://me:secret@host/a?key=secret, (me:secret@host)"
    assert without_logins(hidden) == "s3://***@host/a***, ***@host)"


MAX_BYTES = 15 << 20


def test_wheel_holds_the_package_alone(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "autotune", source / "autotune", ignore=ignored, symlinks=True)
    shutil.copytree(ROOT / "profiles", source / "profiles")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    to = repr(str(tmp_path))
    build = f"import setuptools.build_meta as b; b.build_wheel({to}); b.build_sdist({to})"
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wheel, sdist = next(tmp_path.glob("*.whl")), next(tmp_path.glob("*.tar.gz"))
    assert max(wheel.stat().st_size, sdist.stat().st_size) < MAX_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as file:
        sources = {name.partition("/")[2] for name in file.getnames()}
    shipped = {
        f"autotune/profiles/{path.relative_to(ROOT / 'profiles')}"
        for path in (ROOT / "profiles").rglob("*.*")
    }
    assert shipped | {"autotune/py.typed"} <= names
    info = sdist.name.removesuffix(".tar.gz") + ".dist-info"
    assert f"{info}/licenses/LICENSE" in names
    assert {name.partition("/")[0] for name in names} == {"autotune", info}
    assert shipped | {"autotune/py.typed", "LICENSE"} <= sources
    assert not [name for name in sources if name.startswith(("profiles/", "tests/", "docs/"))]


MAX_FILES = {"HardwareProfile": 16, "Candidate": 14, "caption": 5, "model name": 6}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_objects_walk_through_few_files(tmp_path):
    from benchmarks.walks import as_markdown, trace

    walks = trace(tmp_path)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert as_markdown(walks) in page, "write them anew: python benchmarks/walks.py --write"
    assert [kind for kind, files in walks.items() if len(files) > MAX_FILES[kind]] == []
