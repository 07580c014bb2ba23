"""Loads and saves safetensors files."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.weights.adapters import AdapterFormat, AdapterInfo, read_adapter, save_adapter, write_adapter
    from autotune.weights.building import attribute_tensors, build_empty, cast_as_loaded, dtype_of_from_pretrained
    from autotune.weights.components import (
        DOWNLOAD_AGAIN,
        component_class,
        empty_component,
        load_component,
        read_config,
        read_pipeline,
    )
    from autotune.weights.errors import BadWeights, MissingWeights
    from autotune.weights.hub import fetch, missing_files, snapshot_in_cache
    from autotune.weights.inspection import FileSummary, TensorSummary, inspect_file
    from autotune.weights.layer import Layer
    from autotune.weights.loaders import LOADERS, has_gds, read_whole
    from autotune.weights.resharding import is_whole_model, reshard
    from autotune.weights.saving import save_file
    from autotune.weights.sources import open_source, weights_in
    from autotune.weights.streaming import Transform, fill_random, load_into
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
