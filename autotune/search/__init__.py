"""Which candidate to try next, when to stop, which one wins."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.search.mixtures import find_mixtures, with_mixtures
    from autotune.search.residual import ResidualSearch, best_seconds, memory_upper_bound
    from autotune.search.space import SearchSpace, build_search_space, drop_values
    from autotune.search.study import (
        SearchLimits,
        TrialFunction,
        check_storage,
        memoize,
        open_study,
        publish_plan,
        published_plan,
        run_search,
        search_cost_seconds,
        take_snapshot,
    )
    from autotune.search.winner import (
        ENERGY_HINT,
        Score,
        choose_fallbacks,
        choose_winner,
        explain_choices,
        refuse_beyond,
        require_winner,
        score_finalists,
        score_predictions,
        score_trials,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
