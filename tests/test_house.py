"""Every room has a place in the contracts on imports."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_room_has_a_layer() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    rooms = {file.parent.name for file in (ROOT / "autotune").glob("*/__init__.py")}
    modules = {file.stem for file in (ROOT / "autotune").glob("*.py")} - {"__init__"}
    lines = [line for each in tools["importlinter"]["contracts"] for line in each.get("layers", ())]
    assert {name for line in lines for name in line.split(" | ")} == {
        f"autotune.{name}" for name in rooms | modules
    }


def test_every_folder_of_modules_is_a_package() -> None:
    """The contracts on imports do not see modules in a folder without an `__init__.py`."""
    folders = {file.parent for file in (ROOT / "autotune").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
