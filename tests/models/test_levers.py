"""Every family has each lever or says why not; the documentation's table says the same.

`python -m tests.models.test_levers` writes the table again.
"""

from pathlib import Path

import pytest

import autotune
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.search.comparison import LEVERS

TABLE = Path(__file__).parents[2] / "docs" / "levers.md"
INTRODUCTION = (
    "Which settings that save memory or time each family has, generated from what the families "
    "declare."
)


@pytest.mark.parametrize("name", FAMILIES)
def test_levers_are_declared_or_excluded(name):
    family = FAMILIES[name]
    assert (family.modulation is None) == ("modulation" in family.excluded)
    assert (not family.attention_layouts) == ("norm_rope" in family.excluded)
    assert set(family.excluded) <= set(Candidate.model_fields)
    assert all(reason.strip() for reason in family.excluded.values())
    missing = {title for knob, title in LEVERS.items() if knob in family.excluded}
    is_unet = "UNet" in family.transformer_class
    assert len(LEVERS) - len(missing) >= (3 if is_unet else 4)


def test_lever_table_is_current():
    assert TABLE.read_text() == markdown()


def markdown() -> str:
    models = {model.family: model for model in autotune.list_models()}
    rows = [["family", *LEVERS.values()]]
    reasons = []
    for name, model in models.items():
        rows.append([name, *("yes" if each in model.levers else "no" for each in LEVERS.values())])
        reasons += [f"- {name}, no {each}: {why}." for each, why in model.missing_levers.items()]
    table = [f"| {' | '.join(row)} |" for row in rows]
    table.insert(1, "|---" * len(rows[0]) + "|")
    lines = ["# Levers by family", "", INTRODUCTION, "", *table, "", "Why not:", "", *reasons]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(markdown())
