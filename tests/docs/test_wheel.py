"""Wheel and sdist have all that the package reads, and no more."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


MAX_BYTES = 15 << 20


def test_wheel_and_sdist_hold_the_package_alone(tmp_path):
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
