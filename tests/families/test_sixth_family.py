"""The seam holds: a new family is one file (`sixth_family.py` beside this one) and one line in the registry."""

from types import MappingProxyType

import pytest

from autotune.families import registry, resolve
from tests.families.contract import PROMISES
from tests.families.sixth_family import StableDiffusion3
from tests.families.small import make_small


@pytest.fixture(scope="module")
def registered():
    """The one line."""
    families = MappingProxyType({**registry.FAMILIES, StableDiffusion3.name: StableDiffusion3()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", families)
        patch.setattr(resolve, "FAMILIES", families)
        yield


@pytest.fixture(scope="module")
def sixth(registered, one_thread, tmp_path_factory):
    return make_small(StableDiffusion3(), tmp_path_factory.mktemp("sixth") / "pipeline")


def test_name_gives_the_published_model(registered):
    assert resolve.resolve_model("stable-diffusion-3").spec.num_blocks == 18


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_new_family_keeps_the_same_promises(promise, sixth):
    promise(sixth)
