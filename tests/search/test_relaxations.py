"""What the planner says of other wishes is predicted, and true of its own predictions."""

import re

import pytest

from autotune.errors import NothingFits
from autotune.knobs.registry import KNOBS
from autotune.plan.candidate import Candidate
from autotune.plan.prediction import Prediction
from autotune.search.problem import advise_larger_batch
from autotune.search.space import build_search_space
from tests import builders
from tests.search.formula import FormulaCostModel
from tests.search.machines import CAPABILITIES, HARDWARE, make_plan, request

pytestmark = pytest.mark.usefixtures("_by_formula")


@pytest.mark.quick("1")
@pytest.mark.parametrize(("num_processes", "budget_gib"), [(1, 14), (4, 7.2)])
def test_every_relaxation_that_is_named_really_fits(num_processes: int, budget_gib: float) -> None:
    """Four processes that share the weights out have no use for smaller storages."""
    hardware = builders.hardware(
        *CAPABILITIES, "quantization.torchao-int8", budget_bytes=int(budget_gib * 2**30)
    )
    tight = request(
        resolution=(2048, 2048),
        quality="exact",
        effective_batch_size=4 * num_processes,
        num_gpus=num_processes,
        hardware="another",
    )
    with pytest.raises(NothingFits) as caught:
        make_plan(tight, hardware)
    hint = caught.value.hint
    named = dict(re.findall(r"--(quality|resolution|batch-size|rank) (\w+)", hint))
    assert named, hint
    options = {
        "quality": lambda value: {"quality": value},
        "resolution": lambda value: {"resolution": int(value)},
        "batch-size": lambda value: {"effective_batch_size": int(value)},
        "rank": lambda value: {"rank": int(value)},
    }
    for option, value in named.items():
        make_plan(tight.changed(**options[option](value)), hardware)


@pytest.mark.parametrize("settings", [{"attention": "flash"}, {"swapped_blocks": 40}])
def test_a_larger_batch_is_predicted_only_with_settings_that_run(
    settings: dict[str, object],
) -> None:
    """A batch of captions that differ in length needs a mask; swapped blocks have to recompute."""
    work = builders.workload(effective_batch_size=1)
    context = builders.context(HARDWARE, work)
    asked: list[Candidate] = []

    class Watched(FormulaCostModel):
        def predict(self, candidate: Candidate) -> Prediction:
            asked.append(candidate)
            return super().predict(candidate)

    device = HARDWARE.device.changed(budget_bytes=100 * 2**30)
    cost = Watched(HARDWARE.changed(device=device), work, context.family)
    advise_larger_batch(build_search_space(context), cost, builders.candidate(**settings), 100.0)  # type: ignore[arg-type]
    assert not [one for one in asked for knob in KNOBS if knob.why_not(one, context)]
    assert bool(asked) is ("swapped_blocks" in settings)
