"""Records of measurements: what leaves a machine, stores that teams exchange, and what a search
learns from them.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.sharing.matching import (
        MatchedRecord,
        StoreMatches,
        compare_machine,
        find_matches,
    )
    from autotune.sharing.record import Record, unshareable_reason, workload_class
    from autotune.sharing.store import (
        Store,
        Transfer,
        merge_stores,
        prune_store,
        save_record,
        user_store,
    )
    from autotune.sharing.warm_start import NO_WARM_START, WarmStart, build_warm_start
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
