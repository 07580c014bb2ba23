"""A wheel has all that the package reads."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_has_catalog_and_types(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "autotune", source / "autotune", ignore=ignored, symlinks=True)
    shutil.copytree(ROOT / "profiles", source / "profiles")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as build, sys; print(build.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    shipped = {
        f"autotune/profiles/{path.relative_to(ROOT / 'profiles')}"
        for path in (ROOT / "profiles").rglob("*.*")
    }
    assert shipped | {"autotune/py.typed"} <= names
    assert not [name for name in names if name.startswith(("profiles/", "tests/", "benchmarks/"))]
