"""Predicts memory and step time of a candidate. Pure: no device, file or clock."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.cost.arguments import checked_bucket, parse_resolution, positive, require_divisor
    from autotune.cost.calibration import NOISE, PriorResiduals, residual_of, time_doubt
    from autotune.cost.job_estimate import estimate, job_time
    from autotune.cost.parallel import ONE_PROCESS, Parallel
    from autotune.cost.predict import BLOCK_NUMBERS, CostModel
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
