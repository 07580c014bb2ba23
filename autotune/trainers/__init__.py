"""Configurations of other trainers: a table for each, read into what `autotune.plan` takes and
written from plans.

Pure but for reading the files that are named; imports none of the trainers.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.trainers.auditing import Audit, SettingWorth
    from autotune.trainers.blocks import count_blocks
    from autotune.trainers.exporting import (
        BLOCKS,
        DIFFERENCE_KINDS,
        ExportedConfig,
        export_plan,
        expressible_targets,
        inexpressible,
        overheads_for,
    )
    from autotune.trainers.importing import ConfigLine, ImportedConfig, read_config
    from autotune.trainers.registry import get_trainer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
