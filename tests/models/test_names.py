"""Models by the names that people type: case, spaces and punctuation never matter."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from autotune.errors import InvalidInput
from autotune.models.registry import FAMILIES, find_published, get_family
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef

NAMES = {
    name: model.name
    for family in FAMILIES.values()
    for model in family.models
    for name in (model.name, model.hub_id, *family.aliases)
    if family.aliases.get(name, model.name) == model.name
}


def meant(name):
    found = find_published(name)
    return found and found[1].name


@given(st.sampled_from(sorted(NAMES)), st.sampled_from(["", " ", "-", "_", "."]), st.randoms())
def test_spelling_never_matters(name, joint, random):
    owner, slash, rest = name.rpartition("/")
    parts = re.split(r"[\W_]+", rest)
    typed = owner + slash + joint.join(random.choice([part, part.upper()]) for part in parts)
    assert meant(typed) == meant(name) == (None if name == "flux" else NAMES[name])


TOLD = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text())


@pytest.mark.parametrize(("typed", "told"), TOLD)
def test_other_names_tell_what_is_meant(typed, told):
    for find in (lambda name: resolve_model(ModelRef.of(name)), get_family):
        with pytest.raises(InvalidInput) as refused:
            find(typed)
        words = re.findall(r"[\w.-]*\w", f"{refused.value.message} {refused.value.hint}")
        assert {*words} & {
            model.name for each in FAMILIES.values() for model in each.models
        } == set(told)


def test_repository_is_never_taken_for_another():
    assert meant("someone/flux1-dev") is None
