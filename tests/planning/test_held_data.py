"""What a run holds of its data on the host is in its plan: masks, and a cache in memory, as
encoding leaves them."""

from pathlib import Path

import torch
from PIL import Image

from autotune.cost.predict import CostModel
from autotune.data.cache import MemoryCache
from autotune.data.dataset import read_dataset
from autotune.data.encode import Encoders, encode_dataset
from autotune.data.items import make_options
from autotune.models.resolve import read_parts, resolve_model
from autotune.plan.candidate import CachingSettings
from autotune.plan.job import ModelRef
from autotune.search.expected import held_data_bytes
from tests.train.small import SETTINGS, machine, make_plan, write_model_and_images


def test_masks_and_a_cache_in_memory_are_counted(tmp_path: Path) -> None:
    folder, images = write_model_and_images(tmp_path)
    for number, image in enumerate(sorted(images.glob("*.png"))):
        Image.new("L", (32, 32), 100 + number).save(image.with_suffix(".mask.png"))
    hardware, model = machine(), resolve_model(ModelRef.of(folder))
    plan = make_plan(folder, images, hardware, cache="memory", loss_mask="files", flip=True)
    work, job = plan.frozen.workload, plan.job
    cost = CostModel.build(hardware, work, model.family, model.config, read_parts(model))
    cache = MemoryCache(tmp_path / "cache")
    dataset = read_dataset(images, make_options(dict(job), model.family, 1))
    encoders = Encoders(model, CachingSettings(), SETTINGS, torch.device("cpu"))
    encoded = encode_dataset(encoders, dataset, work.buckets, cache, flip=True)
    masks = sum(mask.nbytes for mask in encoded.masks.values())
    tensors = sum(tensor.nbytes for entry in cache._entries.values() for tensor in entry.values())
    held = held_data_bytes(cost, work, job, "fp32")
    assert masks > 0
    assert abs(held - masks - tensors) < 0.2 * tensors  # captions at their mean length
    without = job.changed(cache="disk", loss_mask="none")
    assert held_data_bytes(cost, work, without, "fp32") == 0
    assert held_data_bytes(cost, work, job.changed(cache="disk"), "fp32") == masks
