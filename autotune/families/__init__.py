"""One file per model family; `base.py` says what a family must answer."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.families.adapter import ADAPTER, add_adapter, dropouts, without_dropout
    from autotune.families.base import VIEWS_PER_IMAGE, Batch, Family, Parts, Sample
    from autotune.families.loss import flow_matching_loss
    from autotune.families.packing import PATCH
    from autotune.families.registry import FAMILIES, family_named
    from autotune.families.resolve import (
        ResolvedModel,
        build_on_meta,
        fetch_model,
        is_family,
        is_on_hub,
        parts_of,
        require_weights,
        resolve_model,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
