"""The parts of making a plan: what is asked, what it stands on, what is frozen, how it is
sealed.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.planning.backend import PlannerBackend
    from autotune.planning.comparison import (
        ComparedGpu,
        Comparison,
        ComparisonOrder,
        compared_gpu,
        download_bytes,
        select_gpus,
    )
    from autotune.planning.elsewhere import CatalogPrediction, NoGpu
    from autotune.planning.planner import PlanInterrupted, PlanningResult, make_plan
    from autotune.planning.problem import require_devices
    from autotune.planning.published_models import ModelSummary, summarize_models
    from autotune.planning.request import PlanRequest, ResolvedRequest, request_from
    from autotune.planning.sealing import measured_here
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
