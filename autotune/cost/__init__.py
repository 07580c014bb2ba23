"""Predicts memory and step time of a candidate. Pure: no device, file or clock."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.cost.calibration import NOISE, PriorResiduals, residual_of, time_doubt
    from autotune.cost.job_estimate import (
        checked_bucket,
        estimate,
        job_time,
        parse_resolution,
        positive,
        require_divisor,
    )
    from autotune.cost.memory import ONE_PROCESS, Parallel
    from autotune.cost.predict import BLOCK_NUMBERS, CostModel
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
