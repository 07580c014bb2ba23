"""The profile store: measurements that teams exchange."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.sharing.exchange import export_to, import_from, merge, prune, verify
    from autotune.sharing.keys import compare, compare_machine, usable_trials
    from autotune.sharing.machines import profile_of_record
    from autotune.sharing.plausibility import implausible
    from autotune.sharing.query import MatchedRecord, StoreMatches, find_matches
    from autotune.sharing.record import Record, class_of, why_no_evidence
    from autotune.sharing.store import Merged, Store, open_store, own_store, remember
    from autotune.sharing.summary import Summary, summaries
    from autotune.sharing.warm_start import NO_WARM_START, WarmStart, build_warm_start
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
