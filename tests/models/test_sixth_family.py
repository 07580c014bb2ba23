"""A new family is one file (`sixth_family.py` beside this one) and one entry point."""

import json
import os
from pathlib import Path

import pytest

from autotune.models import registry
from tests.conftest import autotune


def install(folder: Path, name: str, entry_points: str, group: str, **modules: str) -> Path:
    """A distribution as pip would leave it in `folder`, which then belongs on PYTHONPATH."""
    package, info = folder / name, folder / f"{name}-1.0.dist-info"
    for made in (package, info):
        made.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, text in modules.items():
        (package / f"{module}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
    return folder


@pytest.mark.slow
def test_entry_points_add_families(tmp_path, monkeypatch):
    module = (Path(__file__).parent / "sixth_family.py").read_text()
    site = install(
        tmp_path, "acme", "aura = acme.aura:AuraFlow", group=registry.ENTRY_POINTS, aura=module
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), os.environ.get("PYTHONPATH", ""))))
    listed = autotune("models", "--json")
    assert "aura-flow" in {model["family"] for model in json.loads(listed.stdout)["items"]}
    settings = ("--resolution", "256", "--hardware", "nvidia-rtx-4090", "--json")
    done = autotune("estimate", "--model", "aura-flow", *settings)
    assert done.returncode == 0, done.stderr
    weights_bytes = 2 * 6_800_000_000  # in bf16
    assert json.loads(done.stdout)["prediction"]["run_memory_bytes"] > weights_bytes
