"""The predictions that ship for the catalog: whole, and what the planner says today."""

import json
from dataclasses import replace

import pytest

from autotune.errors import NothingFits
from autotune.machine.catalog import gpu_named, load_catalog, profile_of_gpu
from autotune.models.registry import FAMILIES
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.plan.workload import OptimizerChoice
from autotune.search.comparison import FILE, catalog_predictions
from autotune.search.planner import make_plan
from autotune.search.request import PlanRequest, build_job, request_from
from autotune.system.files import shipped_path
from tests.report.page.pages import golden_plan

KNOWN = json.loads(shipped_path(FILE).read_text())["models"]
WRITE = "write them again: python benchmarks/predict_catalog.py"


def test_catalog_predictions_name_known_models_and_know_every_gpu() -> None:
    """Of models that are not in the file, `models` and `plan` say that nothing was computed
    ahead."""
    gpus = {gpu.id for gpu in load_catalog()}
    models = [model.name or family.name for family in FAMILIES.values() for model in family.models]
    assert {name: set(found) for name, found in KNOWN.items()} == dict.fromkeys(KNOWN, gpus), WRITE
    assert "qwen-image" in KNOWN.keys() <= set(models), WRITE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "gpu"), [("flux1-dev", "nvidia-rtx-4090"), ("kandinsky5-video-lite", "nvidia-l4")]
)
def test_catalog_predictions_are_what_the_planner_says_today(family: str, gpu: str) -> None:
    (known,) = (each for each in catalog_predictions(family) if each.gpu == gpu)
    request, hardware = (
        PlanRequest(model=ModelRef.of(family), is_local=False),
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


def test_an_earlier_plans_learning_rate_is_not_another_optimizers() -> None:
    plan = golden_plan()
    request, model = request_from(plan), resolve_model(ModelRef.of(plan.job.model))
    other = replace(request.workload_overrides, optimizer=OptimizerChoice(name="prodigy"))
    assert build_job(request, model, None, 4).learning_rate == plan.job.learning_rate
    assert (
        build_job(replace(request, workload_overrides=other), model, None, 4).learning_rate == 1.0
    )
    said = replace(request, workload_overrides=other, job_overrides={"learning_rate": 0.5})
    assert build_job(said, model, None, 4).learning_rate == 0.5
