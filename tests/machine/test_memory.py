"""Memory kind and budget: the two signals decide, and a budget never promises what is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import AutotuneError, InvalidInput
from autotune.machine.capabilities import OVERRIDES, classify_memory, compute_budget

SIZES = st.one_of(st.none(), st.integers(0, 2**45))


@pytest.mark.parametrize(
    ("integrated", "pages", "kind"),
    [
        (True, True, "integrated"),  # GB10, Thor
        (True, False, "integrated"),  # Orin
        (False, True, "coherent"),  # GH200, GB200
        (False, False, "discrete"),  # H100, 4090
        (None, None, "discrete"),
        (None, True, "integrated"),
        (False, None, "discrete"),
        (True, None, "integrated"),
        (None, False, "discrete"),
    ],
)
def test_two_signals_decide(integrated, pages, kind):
    assert classify_memory(integrated, pages, None)[0] == kind


@given(st.text(min_size=1))
def test_an_override_is_a_known_kind_or_refused(text):
    if text in OVERRIDES:
        assert classify_memory(None, None, text)[0] == text
        return
    with pytest.raises(InvalidInput):
        classify_memory(None, None, text)


@given(
    st.sampled_from((*OVERRIDES, "host")),
    SIZES,
    SIZES,
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 2**40)),
)
def test_a_budget_never_exceeds_what_is_free(kind, total, free, display, reserve):
    if total is None and free is None:
        with pytest.raises(AutotuneError):
            compute_budget(kind, total, free, display, reserve)
        return
    num_bytes, why = compute_budget(kind, total, free, display, reserve)
    assert 0 <= num_bytes <= min(size for size in (total, free) if size is not None)
    assert why
    if reserve is not None:
        assert compute_budget(kind, total, free, display, reserve + 1)[0] <= num_bytes
