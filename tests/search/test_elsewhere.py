"""The predictions that ship for the catalog: whole, and what the planner says today."""

import json

import pytest

from autotune.errors import NothingFits
from autotune.machine.catalog import gpu_named, profile_of_gpu
from autotune.plan.request import PlanRequest
from autotune.search.comparison import FILE, catalog_predictions
from autotune.search.planner import make_plan
from autotune.system.files import shipped_path

KNOWN = json.loads(shipped_path(FILE).read_text())["models"]
WRITE = "write them again: python benchmarks/predict_catalog.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "gpu"), [("flux1-dev", "nvidia-rtx-4090"), ("kandinsky5-video-lite", "nvidia-l4")]
)
def test_catalog_predictions_are_what_the_planner_says_today(family, gpu):
    (known,) = (each for each in catalog_predictions(family) if each.gpu == gpu)
    request, hardware = (
        PlanRequest(model=family, hardware="another"),
        profile_of_gpu(gpu_named(gpu)),
    )
    try:
        frozen = make_plan(request, hardware).plan.frozen
    except NothingFits:
        assert known.step_seconds is None, WRITE
        return
    assert known.step_seconds == pytest.approx(frozen.expected.step_seconds, rel=0.02), WRITE
    assert known.run_memory_bytes == pytest.approx(frozen.expected.run_memory_bytes, rel=0.02), (
        WRITE
    )
    assert known.settings == frozen.settings, WRITE
