"""What every stage needs of the process it runs in: atomic writes, quiet libraries, threads,
signals, launching.
"""

from typing import TYPE_CHECKING

from autotune.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from autotune.runtime.failures import error_from, error_line, explain_error
    from autotune.runtime.files import (
        PART_FILES,
        atomic_write,
        open_regular,
        read_bounded,
        require_writable,
        write_text_atomic,
    )
    from autotune.runtime.garbage import collect_rarely
    from autotune.runtime.launching import (
        MAX_JOIN_SECONDS,
        Launch,
        adopt_launch,
        current_launch,
        is_first_process,
        launch,
        started_by_launcher,
    )
    from autotune.runtime.lazy import lazy_exports, lazy_module
    from autotune.runtime.memory import (
        allocated_bytes,
        device_peak_bytes,
        drop_mapped_pages,
        host_peak_bytes,
        map_large_buffers,
        measure_peak_memory,
        release_memory,
        reset_host_peak,
        trim_heap,
    )
    from autotune.runtime.paths import cache_path, data_path, shipped_path
    from autotune.runtime.process import prepare_process, reveal_packages
    from autotune.runtime.quiet import redirect_output, silence_libraries, silence_progress_bars
    from autotune.runtime.resources import (
        is_out_of_memory,
        require_free_disk,
        reraise_disk_full,
        reraise_oom,
    )
    from autotune.runtime.scratch import make_scratch_folder
    from autotune.runtime.signals import catch_stop_signals, interrupt_on_signal, preempt_on_signal
    from autotune.runtime.urls import (
        ESCAPE_CHARACTERS,
        SCHEME,
        describe_url,
        is_clear_url,
        quote_error,
    )
    from autotune.runtime.version import __version__
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
