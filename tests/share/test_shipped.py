"""What ships in `profiles/`: the catalog and records that hold, found from a checkout and from a
wheel alike."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import autotune
from autotune.machine.catalog import load_catalog

ROOT = Path(__file__).parents[2]


def test_the_shipped_folder_is_the_one_at_the_top_of_the_repository() -> None:
    assert autotune.shipped_profiles().resolve() == ROOT / "profiles"
    assert len(list((ROOT / "profiles" / "hardware").glob("*.yaml"))) == len(load_catalog())


def test_a_wheel_has_the_catalog_the_records_and_the_types(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "autotune",
        source / "autotune",
        ignore=shutil.ignore_patterns("__pycache__"),
        symlinks=True,
    )
    shutil.copytree(ROOT / "profiles", source / "profiles")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as build, sys; print(build.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    shipped = {
        f"autotune/profiles/{path.relative_to(ROOT / 'profiles')}"
        for path in (ROOT / "profiles").rglob("*.*")
    }
    assert shipped | {"autotune/py.typed"} <= names
    assert not [name for name in names if name.startswith(("profiles/", "tests/", "benchmarks/"))]
