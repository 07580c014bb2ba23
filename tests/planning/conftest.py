"""Planning that predicts by formula, for tests that are about something else."""

from collections.abc import Iterator

import pytest

from tests.planning.formula import by_formula


@pytest.fixture(scope="module", name="_by_formula")
def by_formula_in_a_module() -> Iterator[None]:
    with by_formula(num_blocks=12):  # a search of 50 blocks takes twice as long
        yield
