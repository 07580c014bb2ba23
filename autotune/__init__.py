"""Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes them into a plan.

    import autotune

    plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml")
    report = autotune.train(plan, output="result")
    autotune.sample("result", "a photo of sks dog in the snow")

These functions are what the command line calls. Each loads what it needs when it is first used: importing this package
loads no library.
"""

from typing import TYPE_CHECKING

from autotune.runtime import __version__ as __version__
from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.api import (
        NoSuchFolder,
        PlanFromConfig,
        PlanNotWritten,
        PlanOptions,
        RecordList,
        RecordVerdict,
        Transfer,
        WorkloadOptions,
        audit,
        check,
        check_data,
        compare,
        convert_weights,
        doctor,
        estimate,
        export_config,
        export_records,
        fetch,
        find_record,
        import_config,
        import_records,
        inspect_weights,
        job_script,
        list_choices,
        list_gpus,
        list_models,
        list_records,
        load_plan,
        load_subjects,
        load_variants,
        plan,
        plan_from_config,
        plan_variants,
        probe,
        prune_records,
        publish,
        pull_records,
        push_records,
        read_record,
        report,
        require_gpu,
        require_hub,
        sample,
        save_plan,
        shipped_profiles,
        subject_job,
        train,
        train_many,
        verify_records,
        warm_up,
    )
    from autotune.data import DataReport
    from autotune.demo import ConceptFidelity, Demo, judge_lesson, make_demo
    from autotune.errors import AutotuneError, DoesNotFit, InvalidInput, InvalidPlan, NothingFits, Preempted
    from autotune.families import FetchedModel
    from autotune.hardware import CatalogGpu, Finding
    from autotune.planning import CatalogPrediction, ComparedGpu, Comparison, ModelSummary, NoGpu, PlanInterrupted
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
        Subject,
        SubjectRun,
        TrainingPlan,
        TrialFinished,
        TrialResult,
        TrialStarted,
        Workload,
        event_line,
        plan_text,
    )
    from autotune.search import SearchSpace
    from autotune.sharing import Record, RecordSummary
    from autotune.trainers import Audit, ConfigLine, ExportedConfig, ImportedConfig
    from autotune.weights import FileSummary
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
