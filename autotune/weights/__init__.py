"""Weights in safetensors files: fetch, inspect, stream into a model, save, convert between
formats of adapters.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.weights.adapters import AdapterInfo, read_adapter, save_adapter, write_adapter
    from autotune.weights.components import build_empty_component, check_part, load_component
    from autotune.weights.configs import (
        DOWNLOAD_AGAIN,
        component_class,
        read_config,
        read_model_index,
        require_bounded,
    )
    from autotune.weights.files import (
        BadWeights,
        MissingWeights,
        WeightSource,
        is_model_path,
        open_weights,
        read_header,
        weights_digest,
    )
    from autotune.weights.hub import fetch, missing_files, snapshot_in_cache, verify
    from autotune.weights.inspection import FileSummary, TensorSummary, inspect_file
    from autotune.weights.joined_layers import LoraLayer
    from autotune.weights.layer_names import LAYOUTS, can_write
    from autotune.weights.loaders import LOADERS, has_gds, load_file
    from autotune.weights.publishing import require_hub, upload
    from autotune.weights.resharding import reshard
    from autotune.weights.saving import save_file
    from autotune.weights.single_file import first_names, has_part, view_as
    from autotune.weights.streaming import (
        DtypePolicy,
        Transform,
        attribute_tensors,
        build_empty,
        cast_as_loaded,
        check_source,
        draw_random,
        fill_random,
        from_pretrained_dtypes,
        limit_tensors,
        load_into,
        stream_tensors,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
