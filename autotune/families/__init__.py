"""One file per model family; `base.py` says what a family must implement."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.families.adapter import (
        ADAPTER_NAME,
        adapter_shapes,
        add_adapter,
        block_numbers,
        choose_layers,
        disable_dropout,
        find_dropout_layers,
        target_matcher,
    )
    from autotune.families.base import (
        VIEWS_PER_IMAGE,
        Batch,
        Defaults,
        Family,
        ModulationLayers,
        Parts,
        PublishedModel,
        Sample,
        build_on_meta,
        unwrap_model,
    )
    from autotune.families.levers import LEVERS, missing_levers
    from autotune.families.loss import denoising_loss, image_losses
    from autotune.families.noise import (
        FLOW_MATCHING,
        MIN_SNR_GAMMA,
        DiscreteDiffusion,
        NoiseProcess,
    )
    from autotune.families.registry import FAMILIES, find_published, get_family
    from autotune.families.resolve import (
        FetchedModel,
        ResolvedModel,
        check_weights,
        fetch,
        fetch_model,
        is_fetchable,
        is_on_hub,
        is_single_file,
        read_parts,
        resolve_model,
    )
    from autotune.families.single_file import open_single_file, recognize
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
