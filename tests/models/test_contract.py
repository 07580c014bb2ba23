import pytest

from tests.kinds import KINDS
from tests.models import contract
from tests.models.contract import PROMISES

COSTLY = {
    contract.largest_shapes_run,
    contract.target_sets_nest_and_cover_all_linears,
    contract.every_adapter_layer_learns,
    contract.bf16_trains,
    contract.checkpointing_gives_equal_gradients,
    contract.samples_are_deterministic_and_sized,
}
"""Half a second each: quick for one family of each kind."""


@pytest.mark.quick(*KINDS, *(promise.__name__ for promise in PROMISES if promise not in COSTLY))
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_family_keeps_its_promise(promise, small):
    promise(small)
