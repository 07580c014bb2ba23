"""Cost models that the tests of this room share, so that each tiny model is traced once."""

from collections.abc import Callable

import pytest
from tiny_models import TINY, cpu, workload_of

from autotune.cost.predict import CostModel
from autotune.models.registry import FAMILIES


@pytest.fixture(scope="session")
def predictor() -> Callable[[str], CostModel]:
    made: dict[str, CostModel] = {}

    def of(name: str) -> CostModel:
        if name not in made:
            made[name] = CostModel.build(cpu(), workload_of(name), FAMILIES[name], TINY[name])
        return made[name]

    return of
