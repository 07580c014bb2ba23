"""The frozen objects that flow through autotune, and the plan file that holds them.

    HardwareProfile ─┐
    Workload ────────┼─> Candidate ─> Prediction, TrialResult ─> TrainingPlan ─> RunReport
    Job ─────────────┘

Every object is immutable, refuses unknown fields and non-finite numbers, and carries its units in
its names. Equal inputs give equal objects, so objects can be compared, hashed, stored and replayed.
Files are validated in JSON mode (`model_validate_json`): strict mode would refuse YAML's lists for
tuples.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.schema.base import (
        SCHEMA_VERSION,
        TRIAL_PROTOCOL_VERSION,
        Frozen,
        NaturalInt,
        PositiveInt,
        digest_of,
        first_problem,
    )
    from autotune.schema.candidate import CachingSettings, Candidate, Choice
    from autotune.schema.events import (
        CandidatesPredicted,
        Event,
        Notice,
        OnEvent,
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
        ignore_event,
        parse_event,
    )
    from autotune.schema.forecast import Alternative, Forecast, PhaseForecast, differences_of
    from autotune.schema.hardware import (
        Capability,
        Conditions,
        Datasheet,
        Device,
        DeviceKind,
        HardwareProfile,
        Host,
        Link,
        MemoryBudget,
        MemoryKind,
        OtherGpu,
        Provenance,
        Rate,
        Versions,
        is_at_least,
    )
    from autotune.schema.job import (
        MAX_PREVIEW_PROMPTS,
        VALIDATION_DRAWS,
        AdapterFormat,
        ClipChoice,
        Crop,
        DataPlace,
        Job,
        JobOverrides,
        LossMask,
        ModelRef,
        Place,
        TimestepSampling,
        Weighting,
        as_job_data,
        each_place,
        num_previews,
    )
    from autotune.schema.listing import read_listing
    from autotune.schema.overheads import (
        AdapterPractice,
        KeptPart,
        Overheads,
        Part,
        ProductPractice,
    )
    from autotune.schema.plan import (
        JOULES_PER_KWH,
        CheckResult,
        EncoderGpu,
        Expected,
        FrozenPart,
        PlannedHardware,
        Reason,
        Rejected,
        Strategy,
        TrainingPlan,
    )
    from autotune.schema.plan_file import (
        RUN_PLAN_FILE,
        TEXT_TAG,
        BoundedLoader,
        job_from,
        parse_plan,
        plan_text,
        read_plan,
        seal,
        with_job,
        write_plan,
    )
    from autotune.schema.prediction import (
        Estimate,
        JobTime,
        MemoryBreakdown,
        PhaseMemory,
        Prediction,
        StepTime,
    )
    from autotune.schema.run import AdapterVerdict, RunReport, ValidationResult
    from autotune.schema.trial import (
        MAX_RESIDUAL,
        Outcome,
        PhasePeak,
        QuantizationError,
        Residual,
        TrialResult,
    )
    from autotune.schema.typical import (
        has_typical_shape,
        mean_text_tokens,
        pad_text,
        padded_text_tokens,
        quantiles_of,
        typical_bucket,
        typical_text_tokens,
    )
    from autotune.schema.workload import (
        ADAMW,
        GOALS,
        AdapterKind,
        Bucket,
        ModelSpec,
        Objective,
        OptimizerChoice,
        OptionValue,
        Quality,
        TextPadding,
        Workload,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
