"""A family that autotune does not have is one file and one entry point of another package."""

import json
import os

import pytest

from autotune.models import registry
from tests.conftest import autotune

MODULE = """
from autotune.models.facts import Parts, PublishedModel
from autotune.models.z_image import ZImage

class Aura(ZImage):
    name = "aura-flow"
    models = (PublishedModel("acme/aura", "aura-flow", {"n_layers": 60}, Parts()),)
    pipeline_class = "AuraFlowPipeline"
"""


@pytest.mark.slow
def test_entry_points_add_families(tmp_path, monkeypatch):
    site, info = tmp_path / "site", tmp_path / "site" / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\naura = acme:Aura\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), os.environ.get("PYTHONPATH", ""))))
    listed = autotune("models", "--json")
    assert "aura-flow" in {model["family"] for model in json.loads(listed.stdout)["items"]}
    settings = ("--resolution", "256", "--hardware", "nvidia-rtx-4090", "--json")
    done = autotune("estimate", "--model", "aura-flow", *settings)
    assert done.returncode == 0, done.stderr
    stock = autotune("estimate", "--model", "z-image", *settings)
    larger, smaller = (
        json.loads(told.stdout)["prediction"]["run_memory_bytes"] for told in (done, stock)
    )
    assert larger > 1.5 * smaller
