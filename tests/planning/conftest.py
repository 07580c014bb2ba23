"""Planning that predicts by formula, for tests that are about something else."""

from collections.abc import Iterator
from typing import Any

import pytest

from autotune.cost import predict
from autotune.cost.model import TracedModel
from tests.planning.formula import by_formula


@pytest.fixture(scope="module", name="_by_formula")
def by_formula_in_a_module() -> Iterator[None]:
    with by_formula():
        yield


@pytest.fixture(scope="module", name="_traced_once")
def one_trace_for_a_module() -> Iterator[None]:
    """Plans of a module for the same work share its real traces, which are most of a plan's time."""
    made: dict[str, TracedModel] = {}

    def traced_model(family: Any, config: Any, workload: Any, rules: Any, parts: Any) -> TracedModel:
        asked = f"{family.name} {dict(config)} {workload} {rules} {parts}"
        if asked not in made:
            made[asked] = TracedModel(family, config, workload, rules, parts)
        return made[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "TracedModel", traced_model)
        yield
