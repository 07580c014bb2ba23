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

from autotune.runtime import __version__ as __version__
from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.api.audits import audit
    from autotune.api.checking import check
    from autotune.api.comparing import compare
    from autotune.api.configs import export_config, import_config
    from autotune.api.configured_plans import PlanFromConfig, plan_from_config
    from autotune.api.estimating import estimate
    from autotune.api.files import check_data, convert_weights, inspect_weights
    from autotune.api.machines import list_gpus, list_models, probe, require_gpu
    from autotune.api.options import PlanOptions, WorkloadOptions
    from autotune.api.plan_files import load_plan, save_plan
    from autotune.api.plans import PlanNotWritten, list_choices, plan
    from autotune.api.publishing import publish
    from autotune.api.records import (
        NoSuchFolder,
        RecordSummary,
        list_records,
        prune_records,
        pull_records,
        push_records,
        shipped_profiles,
        verify_records,
    )
    from autotune.api.reports import report
    from autotune.api.runs import sample, train
    from autotune.data import DataReport
    from autotune.demo import ConceptFidelity, Demo, judge_lesson, make_demo
    from autotune.errors import (
        AutotuneError,
        DoesNotFit,
        InvalidInput,
        InvalidPlan,
        NothingFits,
        Preempted,
    )
    from autotune.families import FetchedModel, fetch
    from autotune.hardware import CatalogGpu, Finding, doctor
    from autotune.interop import Audit, ConfigLine, ExportedConfig, ImportedConfig
    from autotune.planning import (
        CatalogPrediction,
        ComparedGpu,
        Comparison,
        ModelSummary,
        NoGpu,
        PlanInterrupted,
    )
    from autotune.runtime import explain_error, is_first_process, prepare_process
    from autotune.schema import (
        Candidate,
        CandidatesPredicted,
        CheckResult,
        Estimate,
        Event,
        HardwareProfile,
        Job,
        JobOverrides,
        ModelSpec,
        Notice,
        PhaseStarted,
        Prediction,
        PreviewsWritten,
        Progressed,
        RecordsMatched,
        RunReport,
        RunStarted,
        SearchSpaceBuilt,
        StatusChanged,
        StepFinished,
        TrainingPlan,
        TrialFinished,
        TrialResult,
        TrialStarted,
        Workload,
        event_line,
        plan_text,
    )
    from autotune.search import SearchSpace
    from autotune.sharing import Record, Transfer
    from autotune.trials import warm_up
    from autotune.weights import FileSummary, require_hub
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
