"""The executor: data, caches, the step, the loop, checkpoints and the report."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.training.adapter_file import save_trained
    from autotune.training.describe import (
        WorkloadOverrides,
        check_job,
        check_overrides,
        describe_workload,
        overrides_from,
        require_even_shares,
    )
    from autotune.training.files import (
        ADAPTER_FILE,
        PREVIEW_NAME,
        PREVIEWS,
        REPORT_FILE,
        comparison_file,
    )
    from autotune.training.fit import (
        KEY_NAMES,
        hardware_misfits,
        key_misfits,
        model_misfits,
        require_fit,
    )
    from autotune.training.folder import (
        check_folder,
        read_report,
        require_separate_output,
    )
    from autotune.training.metrics import METRICS_FILE, read_metrics
    from autotune.training.model import (
        TrainingModel,
        apply_knobs,
        apply_settings,
        eager_eval,
        find_token_multiple,
        load_model,
    )
    from autotune.training.modulation import ConditionedImage, ModulationWindows, pick_inputs
    from autotune.training.monitor import SPILL_FACTOR, Monitor, allocator_retries
    from autotune.training.optimizer import AdapterOptimizer
    from autotune.training.preparation import RunInputs, fetch_weights, prepare, read_inputs
    from autotune.training.preview import Preview, PreviewSampler
    from autotune.training.processes import card_misfits, device_misfits, make_current
    from autotune.training.quality import QualityMissed
    from autotune.training.run import train
    from autotune.training.sample import SampleRequest, read_sample_inputs, sample_run
    from autotune.training.several import train_in_processes
    from autotune.training.step import Noising, StepOutcome, live_tensors, optimizer_step, to_device
    from autotune.training.watchdog import POLL_SECONDS, Watchdog
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
