"""Records of measurements: what leaves a machine, stores that teams exchange, and what a search
learns from them.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.sharing.exchange import merge_stores, prune_store, verify_store
    from autotune.sharing.keys import compare, compare_machine, usable_trials
    from autotune.sharing.machines import hardware_from_record
    from autotune.sharing.plausibility import find_impossibilities
    from autotune.sharing.query import MatchedRecord, StoreMatches, find_matches
    from autotune.sharing.record import (
        MAX_RECORD_BYTES,
        Record,
        name_of,
        parse_record,
        unshareable_reason,
        workload_class,
    )
    from autotune.sharing.store import Store, Transfer, open_store, save_record, user_store
    from autotune.sharing.summary import RecordSummary, summarize_records
    from autotune.sharing.warm_start import NO_WARM_START, WarmStart, build_warm_start
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
