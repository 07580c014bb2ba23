"""The probe: what this machine is and how fast it really runs. Talks to CUDA, NVML and the OS."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.hardware.capabilities import NO_BF16
    from autotune.hardware.catalog import (
        CatalogGpu,
        find_gpu,
        gpu_named,
        load_catalog,
        profile_of_gpu,
        with_assumed_packages,
        with_host_memory,
    )
    from autotune.hardware.device_lock import DeviceLock, lock_for_run, lock_path
    from autotune.hardware.diagnosis import NO_SPILL, Finding, doctor
    from autotune.hardware.energy import (
        EnergyMeter,
        EnergyReading,
        joules_per_image,
        mean_watts,
        why_no_energy,
    )
    from autotune.hardware.memory import (
        MIN_MARGIN_BYTES,
        default_reserve_bytes,
        host_floor_bytes,
        limited_budget,
        process_overhead_bytes,
        shares_host_memory,
    )
    from autotune.hardware.probing import may_have_gpu, probe, with_budget
    from autotune.hardware.sources import (
        available_bytes,
        cudnn_version,
        host_available_bytes,
        memory_bytes,
    )
    from autotune.hardware.store import NOT_SAVED, cached_profile, hardware_named
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
