"""What follows from a question before anything is tried."""

from dataclasses import replace

import pytest

from autotune.backends import WEIGHT_FORMATS
from autotune.planning.alternatives import min_required_bytes
from autotune.planning.problem import PlanningProblem
from autotune.schema.candidate import Candidate
from autotune.schema.hardware import HardwareProfile
from tests import builders
from tests.planning.formula import GIB, FormulaCostModel
from tests.planning.machines import CAPABILITIES, request, surroundings

pytestmark = pytest.mark.usefixtures("_by_formula")


@pytest.mark.parametrize(("budget_gib", "strategy"), [(9, "ddp"), (7, "ddp"), (5, "fsdp2")])
def test_the_model_is_shared_out_only_where_it_fits_a_device_in_no_storage(
    budget_gib: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step needs 8.1 GiB as int8, where the weights alone take 6, and 5.2 as nf4."""

    def weight_bytes(cost: FormulaCostModel, candidate: Candidate) -> int:
        whole = 6 * GIB * WEIGHT_FORMATS[candidate.quantization].bytes_per_parameter
        return int(whole / (cost.parallel.num_processes if cost.parallel.strategy == "fsdp2" else 1))

    monkeypatch.setattr(FormulaCostModel, "weight_bytes", weight_bytes)
    capabilities = (*CAPABILITIES, "quantization.torchao-int8", "quantization.bnb-nf4")
    hardware = builders.hardware(*capabilities, budget_bytes=budget_gib * GIB)
    workload_overrides = replace(request().workload_overrides, effective_batch_size=4, quality="compact")
    case = PlanningProblem.build(
        request(workload_overrides=workload_overrides, num_processes=4, is_local=False), hardware, surroundings()
    )
    assert case.cost.parallel.strategy == strategy


def tight() -> HardwareProfile:
    """3% more than the least prediction: too little for a search, which allows for doubt, enough without."""
    roomy = PlanningProblem.build(request(), builders.hardware(*CAPABILITIES), surroundings())
    return builders.hardware(
        *CAPABILITIES, budget_bytes=round(1.03 * min_required_bytes(roomy.space.candidates, roomy.cost))
    )


@pytest.mark.parametrize(("here", "swapped"), [(True, True), (False, False)])
def test_blocks_may_be_swapped_where_a_search_would_not_dare_to_try_anything_else(here: bool, swapped: bool) -> None:
    case = PlanningProblem.build(request(is_local=here), tight(), surroundings())
    assert (len(case.space.choices["swapped_blocks"]) > 1) is swapped


def test_only_as_many_blocks_are_swapped_as_the_host_has_room_for() -> None:
    """By formula each takes a GiB of it; 48 are available, and 4 are left to it."""
    case = PlanningProblem.build(request(), tight(), surroundings())
    swapped = {candidate.swapped_blocks for candidate in case.space.candidates}
    assert max(swapped) == 37
    assert swapped == set(case.space.choices["swapped_blocks"])
    refused = [item for item in case.space.rejected["swapped_blocks"] if "of the host" in item.reason]
    assert [item.choice for item in refused] == [49]
