"""Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes them
into a plan.

    import autotune

    plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml")
    report = autotune.train(plan, output="result")
    autotune.sample("result", "a photo of sks dog in the snow")

These functions are what the command line calls. Each loads what it needs when it is first used:
importing this package loads no library.
"""

from typing import TYPE_CHECKING

from autotune.system.process import lazy_exports
from autotune.system.version import __version__

if TYPE_CHECKING:
    from autotune.api.audits import audit
    from autotune.api.checking import check
    from autotune.api.comparing import compare
    from autotune.api.configs import export_config, import_config
    from autotune.api.configured_plans import PlanFromConfig, plan_from_config
    from autotune.api.estimating import estimate
    from autotune.api.files import check_data, convert_weights, inspect_weights
    from autotune.api.machines import list_gpus, list_models, probe, require_gpu
    from autotune.api.plan_files import load_plan, save_plan
    from autotune.api.plans import PlanNotWritten, list_choices, plan
    from autotune.api.records import (
        RecordSummary,
        list_records,
        prune_records,
        pull_records,
        push_records,
        verify_records,
    )
    from autotune.api.reports import report
    from autotune.api.runs import sample, train
    from autotune.data.check import DataReport
    from autotune.demo.lesson import ConceptFidelity, Demo, judge_lesson, make_demo
    from autotune.errors import (
        AutotuneError,
        DoesNotFit,
        InvalidInput,
        InvalidPlan,
        NothingFits,
        Preempted,
        explain_error,
    )
    from autotune.events import (
        CandidatesPredicted,
        Event,
        Notice,
        PhaseStarted,
        PreviewsWritten,
        Progressed,
        RecordsMatched,
        RunStarted,
        SearchSpaceBuilt,
        StatusChanged,
        StepFinished,
        TrialFinished,
        TrialStarted,
        event_line,
    )
    from autotune.interop.auditing import Audit
    from autotune.interop.exporting import ExportedConfig
    from autotune.interop.importing import ConfigLine, ImportedConfig
    from autotune.machine.catalog import CatalogGpu
    from autotune.machine.doctor import Finding, doctor
    from autotune.models.resolve import FetchedModel, fetch
    from autotune.plan.candidate import Candidate, TrialResult
    from autotune.plan.file import plan_text
    from autotune.plan.hardware import HardwareProfile
    from autotune.plan.job import Job
    from autotune.plan.plan import CheckResult, TrainingPlan
    from autotune.plan.prediction import Estimate, Prediction
    from autotune.plan.run import RunReport
    from autotune.plan.workload import ModelSpec, Workload
    from autotune.search.comparison import (
        CatalogPrediction,
        ComparedGpu,
        Comparison,
        ModelSummary,
        NoGpu,
    )
    from autotune.search.fork_server import warm_up
    from autotune.search.planner import PlanInterrupted
    from autotune.search.space import SearchSpace
    from autotune.share.record import Record
    from autotune.share.store import Transfer
    from autotune.system.process import is_first_process, prepare_process
    from autotune.weights.tensors import FileSummary
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
