"""Which candidate to try next, when to stop, which one wins."""

from typing import TYPE_CHECKING

from autotune.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from autotune.search.residual import ResidualSearch, best_seconds, cautious_bytes
    from autotune.search.sampler import release_dead, standing_of
    from autotune.search.space import SearchSpace, search_space, without
    from autotune.search.storage import StudyPlace, opened_study, safe_words
    from autotune.search.study import Limits, Run, freeze, frozen_plan, once, run_search, search_cost_seconds
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
