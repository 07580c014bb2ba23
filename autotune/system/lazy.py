"""How a package exports its face: each name is loaded when it is first accessed (PEP 562);
libraries, too.

A package's `__init__.py` lists its face once:

    if TYPE_CHECKING:
        from autotune.cost.predict import CostModel
    else:
        __getattr__, __dir__, __all__ = lazy_exports(__name__)

Type checkers read the imports; at run time the same lines say where each name lives. So importing a
package costs next to nothing, and one that needs torch loads it only when something of it is used.

A module that must not load a library as it is imported, but uses it in its functions, names it the
same way:

    if TYPE_CHECKING:
        import torch
    else:
        torch = lazy_module("torch")
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from autotune.system.process import collect_rarely


def lazy_exports(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for `package`, from the imports under its `if
    TYPE_CHECKING:`.

    Values are not cached: each access reads them from the module that defines the name.
    """
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    homes = _homes(ast.parse(source))
    names = sorted(homes)

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        if module not in sys.modules:
            with collect_rarely():
                importlib.import_module(module)
        return getattr(importlib.import_module(module), original)

    class Face(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            # Importing a package inside binds it here: `autotune.plan` is to stay the function.
            if not (name in homes and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Face
    return get, lambda: names, names


class _LazyModule(ModuleType):
    """Stands for a module until something of it is used. It is for reading: what is set on it,
    others do not see."""

    def __getattr__(self, name: str) -> object:
        if "_module" not in self.__dict__:
            with collect_rarely():
                self._module = importlib.import_module(
                    self.__name__
                )  # waits while another thread imports it
        return getattr(self._module, name)


def lazy_module(name: str) -> ModuleType:
    """A library, or a module of one, that is imported when something of it is first used."""
    return _LazyModule(name)


def _homes(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """For each exported name its module and its name there."""
    guards = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = (node for guard in guards for node in guard.body if isinstance(node, ast.ImportFrom))
    return {a.asname or a.name: (str(node.module), a.name) for node in imports for a in node.names}
