"""Each name of a plan has a word of its own, or people could not tell two settings apart."""

from typing import get_args

from autotune.knobs.registry import NAMES
from autotune.plan.candidate import Candidate, Outcome
from autotune.plan.words import OUTCOMES, TITLES, VALUES, setting_text


def test_no_two_settings_share_their_words():
    assert TITLES.keys() == {*Candidate.model_fields, "caching"}
    texts = [setting_text(name, value) for name, values in NAMES.items() for value in values]
    assert len(set(texts)) == len(texts)
    assert all(set(VALUES[name]) - {0} <= set(NAMES[name]) for name in VALUES)
    assert set(get_args(Outcome)) == OUTCOMES.keys()
