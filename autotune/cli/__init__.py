"""The command line: parses options, calls one function of the front door, prints."""

from typing import TYPE_CHECKING

from autotune.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from autotune.cli.app import main
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
