"""The probe: what this machine is and how fast it really runs. Talks to CUDA, NVML and the OS."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.hardware.catalog import CatalogGpu, load_catalog, matching, profile_of_gpu
    from autotune.hardware.device_lock import DeviceLock, held_for_run, lock_path, locked
    from autotune.hardware.diagnosis import Finding, doctor
    from autotune.hardware.memory import (
        LEAST_MARGIN_BYTES,
        host_floor_bytes,
        process_overhead_bytes,
        shares_host_memory,
        usual_reserve,
    )
    from autotune.hardware.probing import probe, with_budget, with_cap, with_rates, with_reserve
    from autotune.hardware.sources import memory_bytes, memory_limits
    from autotune.hardware.store import NOT_KEPT, cached_profile, hardware_named
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
