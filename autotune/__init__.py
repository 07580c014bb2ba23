"""Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes them
into a plan.

    import autotune

    plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml")
    report = autotune.train(plan, output="result")
    autotune.sample("result", "a photo of sks dog in the snow")

Importing this package loads nothing: each name is loaded when it is first used. `autotune.api` has
a few functions more; `autotune.records`, `autotune.events`, `autotune.errors` and the objects in
`autotune.plan` are modules of their own.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.system.version import __version__

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
    from autotune.api import (
        audit,
        check,
        check_data,
        compare,
        estimate,
        export_config,
        import_config,
        list_gpus,
        list_models,
        load_plan,
        plan,
        probe,
        sample,
        save_plan,
        train,
    )
    from autotune.errors import AutotuneError
    from autotune.machine.doctor import doctor
    from autotune.models.resolve import fetch
    from autotune.report.pages import report

HOMES = {
    "AutotuneError": "errors",
    "doctor": "machine.doctor",
    "fetch": "models.resolve",
    "report": "report.pages",
}
"""Names that are not defined in `api`."""
OLD = {
    "PlanFromConfig": "autotune.api",
    "plan_from_config": "autotune.api",
    "convert_weights": "autotune.api",
    "inspect_weights": "autotune.api",
    "require_gpu": "autotune.api",
    "PlanNotWritten": "autotune.api",
    "list_choices": "autotune.api",
    "RecordSummary": "autotune.records",
    "list_records": "autotune.records",
    "prune_records": "autotune.records",
    "pull_records": "autotune.records",
    "push_records": "autotune.records",
    "verify_records": "autotune.records",
    "DataReport": "autotune.data.dataset",
    "ConceptFidelity": "autotune.demo.lesson",
    "Demo": "autotune.demo.lesson",
    "judge_lesson": "autotune.demo.lesson",
    "make_demo": "autotune.demo.lesson",
    "DoesNotFit": "autotune.errors",
    "InvalidInput": "autotune.errors",
    "InvalidPlan": "autotune.errors",
    "NothingFits": "autotune.errors",
    "Preempted": "autotune.errors",
    "CandidatesPredicted": "autotune.events",
    "Event": "autotune.events",
    "Notice": "autotune.events",
    "PhaseStarted": "autotune.events",
    "PreviewsWritten": "autotune.events",
    "Progressed": "autotune.events",
    "RecordsMatched": "autotune.events",
    "RunStarted": "autotune.events",
    "SearchSpaceBuilt": "autotune.events",
    "StatusChanged": "autotune.events",
    "StepFinished": "autotune.events",
    "TrialFinished": "autotune.events",
    "TrialStarted": "autotune.events",
    "event_line": "autotune.events",
    "Audit": "autotune.interop.auditing",
    "ExportedConfig": "autotune.interop.exporting",
    "ConfigLine": "autotune.interop.importing",
    "ImportedConfig": "autotune.interop.importing",
    "CatalogGpu": "autotune.machine.catalog",
    "Finding": "autotune.machine.doctor",
    "FetchedModel": "autotune.models.resolve",
    "Candidate": "autotune.plan.candidate",
    "TrialResult": "autotune.plan.candidate",
    "plan_text": "autotune.plan.file",
    "HardwareProfile": "autotune.plan.hardware",
    "Job": "autotune.plan.job",
    "CheckResult": "autotune.plan.plan",
    "TrainingPlan": "autotune.plan.plan",
    "Estimate": "autotune.plan.prediction",
    "Prediction": "autotune.plan.prediction",
    "RunReport": "autotune.plan.run",
    "ModelSpec": "autotune.plan.workload",
    "Workload": "autotune.plan.workload",
    "CatalogPrediction": "autotune.search.comparison",
    "ComparedGpu": "autotune.search.comparison",
    "Comparison": "autotune.search.comparison",
    "ModelSummary": "autotune.search.comparison",
    "NoGpu": "autotune.search.comparison",
    "warm_up": "autotune.search.fork_server",
    "PlanInterrupted": "autotune.search.planner",
    "SearchSpace": "autotune.search.space",
    "Record": "autotune.share.record",
    "Transfer": "autotune.share.store",
    "explain_error": "autotune.errors",
    "is_first_process": "autotune.system.process",
    "prepare_process": "autotune.system.process",
    "FileSummary": "autotune.weights.tensors",
}


def __getattr__(name: str) -> Any:
    if name in OLD:
        return getattr(
            importlib.import_module(OLD[name]),
            {"list_records": "list_records"}.get(name, name.removesuffix("_records")),
        )
    if name not in __all__:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    from autotune.system.process import collect_rarely

    with collect_rarely():
        return getattr(importlib.import_module(f"autotune.{HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return __all__


class _Face(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Importing a folder inside binds it here: `autotune.plan` is to stay the function.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
