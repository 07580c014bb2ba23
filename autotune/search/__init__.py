"""Which candidate to try next, when to stop, which one wins."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.search.residual import ResidualSearch, best_seconds, memory_upper_bound
    from autotune.search.sampler import release_dead, take_snapshot
    from autotune.search.space import SearchSpace, search_space, without
    from autotune.search.storage import StudyPlace, opened_study, translate_storage_errors
    from autotune.search.study import Limits, Run, frozen_plan, memoize, publish_plan, run_search, search_cost_seconds
    from autotune.search.winner import (
        Score,
        fallbacks_of,
        measured_scores,
        predicted_scores,
        promised_scores,
        reasons_for,
        require_winner,
        winner_of,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
