"""Loss masks: which parts of an image the loss counts, by a mask beside it or by its own alpha
channel."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from autotune.data.cache import Cache, entry_key
from autotune.data.items import Item, file_digest
from autotune.data.pixels import CENTERING, open_mask
from autotune.plan.workload import Bucket


def find_mask(
    cache: Cache, item: Item, path: Path, bucket: Bucket, size: tuple[int, int]
) -> tuple[str, Tensor]:
    """The key and the mask of an item at the (height, width) of its latents: uint8, 255 where all
    of the loss counts.

    `path` is the mask's file, or the item's own for its alpha channel.

    Raises:
        OSError: a file cannot be read or decoded.
    """
    shape = (bucket.width_px, bucket.height_px)
    is_alpha, digest = path == item.path, file_digest(path)
    key = entry_key("mask", file=digest, alpha=is_alpha, size=shape, latents=size, crop=item.crop)
    stored = cache.read(key)
    if stored is not None:
        return key, stored["mask"]
    try:
        mask = ImageOps.fit(
            open_mask(path, is_alpha=is_alpha), shape, centering=CENTERING[item.crop]
        )
    except MemoryError:  # says nothing of the file
        raise
    except Exception as error:  # decoders raise anything for damaged files
        raise OSError(f"the mask {path.name} cannot be decoded: {error}") from error
    small = mask.resize(
        (size[1], size[0]), Image.Resampling.BOX
    )  # the mean over the pixels of each latent
    tensor = torch.from_numpy(np.array(small))
    cache.write(key, {"mask": tensor})
    return key, tensor


def loss_weights(
    mask: Tensor | None, size: tuple[int, int], *, floor: float, weight: float, flipped: bool
) -> Tensor:
    """Factors of the loss of one item, (1, 1, height, width): `floor` where its mask is black,
    times its `weight`."""
    if mask is None:
        return torch.full((1, 1, *size), weight)
    if flipped:
        mask = mask.flip(-1)
    return ((floor + (1 - floor) * mask.float() / 255) * weight)[None, None]
