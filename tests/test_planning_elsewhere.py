"""Plans and estimates for machines that are not here, and what ships for the catalog."""

import json

import pytest

from autotune.errors import NothingFits
from autotune.knobs.knob import TuningContext
from autotune.machine.catalog import gpu_named, profile_of_gpu
from autotune.machine.probe import hardware_for
from autotune.plan.request import PlanRequest
from autotune.plan.workload import WorkloadRequest
from autotune.search.comparison import FILE, catalog_predictions
from autotune.search.request import ResolvedRequest, build_space
from autotune.system.files import shipped_path
from tests.search.machines import make_plan

SMALL = WorkloadRequest(resolution=(512, 512), effective_batch_size=2)


def test_overflowing_models_are_planned_fp32():
    request = PlanRequest(model="kandinsky5-image-lite", **SMALL.given)

    def precisions(request: PlanRequest) -> object:
        asked = ResolvedRequest.build(request, needs_weights=False)
        context = TuningContext(hardware_for("T4"), asked.model.family, asked.workload)
        return build_space(request, context).choices["precision"]

    assert precisions(request) == ("fp32",)
    assert precisions(request.changed(pins=(("precision", "fp16"),))) == ("fp16",)


KNOWN = json.loads(shipped_path(FILE).read_text())["models"]
WRITE = "write them again: python benchmarks/predict_catalog.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "gpu"),
    [("flux1-dev", "nvidia-rtx-4090"), ("kandinsky5-video-lite", "nvidia-rtx-3090")],
)
def test_catalog_predictions_are_todays(family, gpu):
    (known,) = (each for each in catalog_predictions(family) if each.gpu == gpu)
    request, hardware = (
        PlanRequest(model=family, hardware="another"),
        profile_of_gpu(gpu_named(gpu)),
    )
    try:
        frozen = make_plan(request, hardware).frozen
    except NothingFits:
        assert known.step_seconds is None, WRITE
        return
    assert known.step_seconds == pytest.approx(frozen.expected.step_seconds, rel=0.02), WRITE
    assert known.run_memory_bytes == pytest.approx(frozen.expected.run_memory_bytes, rel=0.02), (
        WRITE
    )
    assert known.settings == frozen.settings, WRITE
