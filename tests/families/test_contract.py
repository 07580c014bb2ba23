import pytest

from tests.families.contract import PROMISES


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_family_keeps_its_promise(promise, small):
    promise(small)
