"""Where autotune keeps its own files: below the folders that the operating system gives each
user (platformdirs)."""

from importlib.resources import files
from pathlib import Path

import platformdirs


def cache_path(*parts: str) -> Path:
    """A path in the user's cache folder: what lies there can be computed again."""
    return platformdirs.user_cache_path("autotune").joinpath(*parts)


def data_path(*parts: str) -> Path:
    """A path in the user's data folder: what lies there would be lost work."""
    return platformdirs.user_data_path("autotune").joinpath(*parts)


def shipped_path(*parts: str) -> Path:
    """A path in `profiles/`, which ships with autotune: the catalog of GPUs, and shared records."""
    return Path(str(files("autotune") / "profiles")).joinpath(*parts)
