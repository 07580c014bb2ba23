"""Configurations of other trainers: key tables as data, read into what `autotune.plan` takes and
written from plans.

Pure but for reading the files that are named; imports none of the trainers.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.interop.auditing import Audit, SettingWorth
    from autotune.interop.exporting import (
        BLOCKS,
        DIFFERENCE_KINDS,
        ExportedConfig,
        export_plan,
        expressible_targets,
        inexpressible,
        overheads_for,
    )
    from autotune.interop.importing import ConfigLine, ImportedConfig, read_config
    from autotune.interop.rules import count_blocks
    from autotune.interop.trainer import get_trainer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
