"""Training data: read a folder, sort it into buckets, encode and cache it, order it into
batches.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.data.batches import BatchOrder, Draw
    from autotune.data.buckets import assign_buckets, make_buckets
    from autotune.data.cache import Cache, MemoryCache, entry_key, tensors_digest
    from autotune.data.captions import EMPTY_CAPTION
    from autotune.data.check import MAX_CROP, MAX_UPSCALING, DataReport, check_dataset
    from autotune.data.dataset import Dataset, scan_dataset
    from autotune.data.encode import EncodedDataset, encode_dataset, list_entries, open_pixels
    from autotune.data.encoders import Encoders, move_tensors
    from autotune.data.entries import EncoderIdentity, ItemEntries, make_prompt_entry
    from autotune.data.files import has_video_decoder
    from autotune.data.held_out import SplitDataset, read_split
    from autotune.data.items import Item
    from autotune.data.loader import BatchLoader
    from autotune.data.options import make_options
    from autotune.data.pixels import open_image, to_rgb
    from autotune.data.sources import data_text, is_list, list_places
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
