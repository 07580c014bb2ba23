"""Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes them
into a plan.

    import autotune

    plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml")
    report = autotune.train(plan, output="result")
    autotune.sample("result", "a photo of sks dog in the snow")

Importing this package loads nothing: each name is loaded when it is first used. `autotune.api`,
`autotune.records`, `autotune.events`, `autotune.errors` and the rooms' modules have the rest.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from autotune.system.process import silence_libraries
from autotune.system.version import __version__

silence_libraries()  # before the first of them is imported, by whatever module

__all__ = [
    "AutotuneError",
    "__version__",
    "audit",
    "check",
    "check_data",
    "compare",
    "doctor",
    "estimate",
    "export_config",
    "fetch",
    "import_config",
    "list_gpus",
    "list_models",
    "load_plan",
    "plan",
    "probe",
    "report",
    "sample",
    "save_plan",
    "train",
]

if TYPE_CHECKING:
    from autotune import events as events, records as records
    from autotune.api import check, compare, estimate, list_gpus, list_models, plan, probe
    from autotune.errors import AutotuneError
    from autotune.exchange import audit, export_config
    from autotune.interop.importing import import_config
    from autotune.machine.doctor import doctor
    from autotune.models.resolve import fetch
    from autotune.plan.file import load_plan, save_plan
    from autotune.report.files import report
    from autotune.training import check_data, sample, train
else:
    HOMES = {
        "AutotuneError": "errors",
        "audit": "exchange",
        "check_data": "training",
        "doctor": "machine.doctor",
        "export_config": "exchange",
        "fetch": "models.resolve",
        "import_config": "interop.importing",
        "load_plan": "plan.file",
        "report": "report.files",
        "sample": "training",
        "save_plan": "plan.file",
        "train": "training",
    }

    def __getattr__(name: str) -> object:
        if name in ("events", "records"):
            return importlib.import_module(f"autotune.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'autotune' has no attribute {name!r}")
        from autotune.errors import raise_typed
        from autotune.system.process import collect_rarely

        with collect_rarely():
            found = getattr(importlib.import_module(f"autotune.{HOMES.get(name, 'api')}"), name)
        return found if isinstance(found, type) else raise_typed(found)


def __dir__() -> list[str]:
    return __all__


class _Face(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Importing a folder inside binds it here: `autotune.plan` is to stay the function.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
