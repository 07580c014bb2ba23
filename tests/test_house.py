"""Every room has a place in the contracts on imports."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_room_has_a_layer() -> None:
    """A room that is added to no contract would be checked by none."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    packages = {
        f"autotune.{file.parent.name}" for file in (ROOT / "autotune").glob("*/__init__.py")
    }
    names = ("__main__", "api", "errors", "events", "records")
    modules = {f"autotune.{name}" for name in names}
    layers = {
        name for each in contracts for line in each.get("layers", ()) for name in line.split(" | ")
    }
    assert layers == packages | modules


def test_every_folder_of_modules_is_a_package() -> None:
    """The contracts on imports do not see modules in a folder without an `__init__.py`."""
    folders = {file.parent for file in (ROOT / "autotune").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
