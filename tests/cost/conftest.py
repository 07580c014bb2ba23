"""Cost models that the tests of this room share, so that each tiny model is traced once."""

import pytest
from tiny_models import TINY, cpu, workload_of

from autotune.cost.predict import CostModel
from autotune.models.registry import FAMILIES


@pytest.fixture(scope="session")
def predictor():
    made = {}

    def of(name):
        if name not in made:
            made[name] = CostModel.build(cpu(), workload_of(name), FAMILIES[name], TINY[name])
        return made[name]

    return of
