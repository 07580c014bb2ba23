"""Plans and estimates for machines that are not here, and what ships for the catalog."""

import json

import pytest

from autotune.errors import NothingFits
from autotune.knobs.knob import TuningContext
from autotune.machine.catalog import gpu_named, profile_of_gpu
from autotune.machine.probe import hardware_for
from autotune.plan.candidate import BLOCK_COUNTS, Candidate
from autotune.plan.request import PlanRequest
from autotune.plan.workload import WorkloadRequest
from autotune.search.comparison import FILE, catalog_predictions
from autotune.search.problem import PlannerBackend, PlanningProblem
from autotune.search.request import ResolvedRequest, space_for
from autotune.search.space import TIE
from autotune.search.winner import require_winner, score_predictions
from autotune.system.files import shipped_path
from tests.search.machines import make_plan

SMALL = WorkloadRequest(resolution=(512, 512), effective_batch_size=2)


def test_overflowing_models_are_planned_fp32():
    request = PlanRequest(model="kandinsky5-image-lite", **SMALL.given)

    def precisions(request):
        asked = ResolvedRequest.build(request, needs_weights=False)
        context = TuningContext(hardware_for("T4"), asked.model.family, asked.workload)
        return space_for(request, context).choices["precision"]

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
    request, hardware = PlanRequest(model=family, hardware="any"), profile_of_gpu(gpu_named(gpu))
    try:
        frozen = make_plan(request, hardware).frozen
    except NothingFits:
        assert known.step_seconds is None, WRITE
        return
    expected = frozen.expected
    assert known.step_seconds == pytest.approx(expected.step_seconds, rel=0.02), WRITE
    assert known.run_memory_bytes == pytest.approx(expected.run_memory_bytes, rel=0.02), WRITE
    assert known.settings == frozen.settings, WRITE


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["3060", "3090", "5090", "h100-sxm"])
@pytest.mark.parametrize("family", ["sdxl", "flux1-dev", "qwen-image", "z-image", "flux2-dev"])
def test_knobs_are_worth_three_percent(family, gpu):
    """Or it is what makes the plan fit: nothing that runs has some of its knobs plain, the others
    as they are, and is as fast."""
    request, hardware = PlanRequest(model=family, hardware="any"), profile_of_gpu(gpu_named(gpu))
    problem = PlanningProblem.build(request, hardware, PlannerBackend(needs_weights=False))
    predictions = [problem.cost.predict(each) for each in problem.space.candidates]
    running = [each for each in predictions if each.run_memory_bytes <= problem.budget_bytes]
    fastest = min(each.step_seconds for each in running)
    scores = score_predictions(running, problem.budget_bytes)
    best = require_winner(scores, "throughput", lambda: "")
    plain = Candidate(micro_batch_size=1, checkpointed_blocks=0, precision="bf16")

    def used(candidate):
        values = {(name, value > 0 if name in BLOCK_COUNTS else value) for name, value in candidate}
        free = {"micro_batch_size", "checkpointed_blocks"}
        return {(n, v) for n, v in values if n not in free and v != getattr(plain, n)}

    for each in running:
        if used(each.candidate) < used(best.candidate):
            takes_more = each.host_memory_bytes > best.host_memory_bytes
            is_slower = each.step_seconds > (1 + TIE) * fastest
            is_less_exact = each.candidate.quantization != best.candidate.quantization
            assert takes_more or is_slower or is_less_exact, each.candidate
