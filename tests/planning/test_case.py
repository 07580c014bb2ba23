"""What follows from a question before anything is tried."""

from dataclasses import replace

import pytest

from autotune.knobs.quantization import STORAGES
from autotune.planning.alternatives import least_bytes
from autotune.planning.case import case_of
from autotune.schema import Candidate
from tests import builders
from tests.planning.formula import GIB, FormulaPredictor
from tests.planning.machines import GATES, question, surroundings

pytestmark = pytest.mark.usefixtures("_by_formula")


@pytest.mark.parametrize(("budget_gib", "strategy"), [(9, "ddp"), (7, "ddp"), (5, "fsdp2")])
def test_the_model_is_shared_out_only_where_it_fits_a_device_in_no_storage(
    budget_gib: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step needs 8.1 GiB as int8, where the weights alone take 6, and 5.2 as nf4."""

    def weight_bytes(cost: FormulaPredictor, candidate: Candidate) -> int:
        whole = 6 * GIB * STORAGES[candidate.quantization].bytes_per_parameter
        return int(whole / (cost.parallel.num_processes if cost.parallel.strategy == "fsdp2" else 1))

    monkeypatch.setattr(FormulaPredictor, "weight_bytes", weight_bytes)
    gates = (*GATES, "quantization.torchao-int8", "quantization.bnb-nf4")
    hardware = builders.hardware(*gates, budget_bytes=budget_gib * GIB)
    wishes = replace(question().wishes, effective_batch_size=4, quality="compact")
    case = case_of(question(wishes=wishes, num_processes=4, here=False), hardware, surroundings())
    assert case.cost.parallel.strategy == strategy


@pytest.mark.parametrize(("here", "swapped"), [(True, True), (False, False)])
def test_blocks_may_be_swapped_where_a_search_would_not_dare_to_try_anything_else(here: bool, swapped: bool) -> None:
    """The budget is 3% above the least prediction: too little for a search, which allows for doubt, enough without."""
    asked = question(here=here)
    roomy = case_of(question(), builders.hardware(*GATES), surroundings())
    budget = round(1.03 * least_bytes(roomy.space.candidates, roomy.cost))
    case = case_of(asked, builders.hardware(*GATES, budget_bytes=budget), surroundings())
    assert (len(case.space.choices["swapped_blocks"]) > 1) is swapped
