"""Writes docs/levers.md from what the families declare: python docs/site/levers.py"""

from pathlib import Path

import autotune
from autotune.search.comparison import LEVERS

PAGE = Path(__file__).parents[2] / "docs" / "levers.md"
INTRODUCTION = (
    "Which settings that save memory or time each family has, generated from what the families "
    "declare."
)


def markdown() -> str:
    """Write the page."""
    models = {model.family: model for model in autotune.list_models()}
    rows = [["family", *LEVERS.values()]]
    reasons = []
    for name, model in models.items():
        rows.append([name, *("yes" if each in model.levers else "no" for each in LEVERS.values())])
        reasons += [f"- {name}, no {each}: {why}." for each, why in model.missing_levers.items()]
    table = [f"| {' | '.join(row)} |" for row in rows]
    table.insert(1, "|---" * len(rows[0]) + "|")
    lines = ["# Settings by family", "", INTRODUCTION, "", *table, "", "Why not:", "", *reasons]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(markdown())
