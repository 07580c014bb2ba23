"""The functions behind `import autotune`: everything that a command does, for notebooks and programs.

The command line is thin over exactly these. What long work tells goes to `on_event`; errors are `AutotuneError`s.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.api.audits import audit
    from autotune.api.checking import check
    from autotune.api.comparing import compare
    from autotune.api.configs import export_config, import_config
    from autotune.api.configured_plans import PlanFromConfig, plan_from_config
    from autotune.api.estimating import estimate
    from autotune.api.files import check_data, convert_weights, inspect_weights
    from autotune.api.jobs import job_script
    from autotune.api.machines import doctor, list_gpus, probe, require_gpu
    from autotune.api.many_runs import load_subjects, subject_job, train_many
    from autotune.api.models import fetch, list_models
    from autotune.api.options import PlanOptions, WorkloadOptions
    from autotune.api.plan_files import load_plan, load_variants, save_plan
    from autotune.api.plans import PlanNotWritten, list_choices, plan, plan_variants
    from autotune.api.publishing import publish, require_hub
    from autotune.api.records import (
        NoSuchFolder,
        RecordList,
        RecordVerdict,
        Transfer,
        export_records,
        find_record,
        import_records,
        list_records,
        prune_records,
        pull_records,
        push_records,
        read_record,
        shipped_profiles,
        verify_records,
    )
    from autotune.api.reports import report
    from autotune.api.runs import sample, train
    from autotune.api.warming import warm_up
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
