"""Every room has a place in the contracts on imports, and few imports hide in functions."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_HIDDEN_IMPORTS = 100
"""Libraries that must not load early are named at the top by `lazy_module`; what is left costs a
command its start.
"""


@cache
def _sources() -> dict[Path, str]:
    return {
        file.relative_to(ROOT): file.read_text()
        for file in sorted((ROOT / "autotune").rglob("*.py"))
    }


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_few_imports_hide_in_functions() -> None:
    hidden = {
        (file, node.lineno)
        for file, text in _sources().items()
        for function in _functions(ast.parse(text))
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert 0 < len(hidden) < MAX_HIDDEN_IMPORTS


def test_every_room_has_a_place_and_is_closed_to_the_command_line() -> None:
    """A room that is added to no contract would be checked by none. Doors have all rooms in one
    pattern.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    packages = {
        f"autotune.{file.parent.name}" for file in (ROOT / "autotune").glob("*/__init__.py")
    }
    modules = {"autotune.errors", "autotune.__main__"}
    layers = {
        name for each in contracts for line in each.get("layers", ()) for name in line.split(" | ")
    }
    assert layers == packages | modules
    (thin,) = (each for each in contracts if each.get("source_modules") == ["autotune.cli"])
    assert set(thin["forbidden_modules"]) == packages - {"autotune.cli", "autotune.reporting"} | {
        "autotune.errors"
    }


def test_every_folder_of_modules_is_a_package() -> None:
    """The contracts on imports do not see modules in a folder without an `__init__.py`."""
    folders = {(ROOT / file).parent for file in _sources()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_drawing_of_the_house_has_every_room_in_the_order_of_the_layers() -> None:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]["layers"]
    ranks = {
        name.partition(".")[2]: rank
        for rank, line in enumerate(layers)
        for name in line.split(" | ")
    }
    house = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .partition("## The house")[2]
        .partition("\nImports")[0]
    )
    drawn = re.findall(r"^    (?!autotune/)([a-z]+)(?:/|\.py)", house, re.MULTILINE)
    assert {*drawn, "__main__", "errors"} == ranks.keys()
    assert [ranks[room] for room in drawn] == sorted(ranks[room] for room in drawn)
