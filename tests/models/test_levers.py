"""Every family has each lever or says why not; the documentation's table says the same.

`python -m tests.models.test_levers` writes the table again.
"""

from pathlib import Path

import pytest

import autotune
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.search.comparison import LEVERS, missing_levers

TABLE = Path(__file__).parents[2] / "docs" / "levers.md"
INTRODUCTION = (
    "Which settings that save memory or time each family has, generated from what the "
    "families "
    "declare."
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_lever_is_declared_or_excluded_with_the_reason(name: str) -> None:
    family = FAMILIES[name]
    assert (family.modulation is None) == ("modulation" in family.excluded)
    assert (not family.attention_layouts) == ("norm_rope" in family.excluded)
    assert set(family.excluded) <= set(Candidate.model_fields)
    assert all(reason.strip() for reason in family.excluded.values())
    missing = missing_levers(family)
    is_unet = "UNet" in family.transformer_class
    assert len(LEVERS) - len(missing) >= (3 if is_unet else 4)


def test_the_table_in_the_documentation_is_of_these_families() -> None:
    assert TABLE.read_text() == markdown()


def test_models_tell_their_levers() -> None:
    told = {model.name: model for model in autotune.list_models()}
    assert told["qwen-image"].levers == tuple(LEVERS.values())
    assert told["qwen-image"].missing_levers == {}
    assert "UNet" in told["sdxl"].missing_levers["modulation ahead"]
    assert set(told["sdxl"].levers) | set(told["sdxl"].missing_levers) == set(LEVERS.values())


def markdown() -> str:
    """The table, with the reason where a lever is missing."""
    families = {model.family: model for model in autotune.list_models()}
    rows = [["family", *LEVERS.values()]]
    for name, model in families.items():
        rows.append(
            [name, *("yes" if title in model.levers else "no" for title in LEVERS.values())]
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    missing = [
        (name, *pair) for name, model in families.items() for pair in model.missing_levers.items()
    ]
    reasons = [f"- {name}, no {title}: {why}." for name, title, why in missing]
    return (
        "\n".join(
            ["# Levers by family", "", INTRODUCTION, "", *lines, "", "Why not:", "", *reasons]
        )
        + "\n"
    )


if __name__ == "__main__":
    TABLE.write_text(markdown())
