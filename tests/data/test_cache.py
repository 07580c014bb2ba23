"""The cache gives back what was put in, or nothing."""

import os
import time

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from autotune.data.cache import Cache
from autotune.errors import AutotuneError

TENSORS = {
    "latents": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_entries_come_back_exactly(tmp_path):
    cache = Cache(tmp_path / "new" / "cache")
    assert cache.read("a") is None
    cache.write("a", {**TENSORS, "view": TENSORS["latents"].permute(2, 0, 1)})
    read = cache.read("a")
    assert read is not None
    assert torch.equal(read.pop("view"), TENSORS["latents"].permute(2, 0, 1))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype
    assert names(cache.folder) == ["a.safetensors"]


@pytest.fixture(scope="module")
def whole_entry(tmp_path_factory):
    cache = Cache(tmp_path_factory.mktemp("whole"))
    cache.write("a", TENSORS)
    return (cache.folder / "a.safetensors").read_bytes()


def test_renamed_entries_are_not_taken(tmp_path):
    cache = Cache(tmp_path)
    cache.write("a", TENSORS)
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    assert cache.read("b") is None
    assert names(tmp_path) == []


@given(data=st.data())
@settings(max_examples=150)
def test_damaged_entries_are_removed(data, whole_entry, tmp_path_factory):
    cache = Cache(tmp_path_factory.mktemp("damaged"))
    path = cache.folder / "a.safetensors"
    position = data.draw(st.integers(0, len(whole_entry) - 1))
    if data.draw(st.booleans(), label="truncate"):
        path.write_bytes(whole_entry[:position])
    else:
        content = bytearray(whole_entry)
        content[position] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
    read = cache.read("a")
    if read is None:
        assert not path.exists()
    else:  # padding of the header
        assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_pickled_files_are_never_looked_at(tmp_path):
    torch.save(TENSORS, tmp_path / "a.pt")
    torch.save(TENSORS, tmp_path / "a.safetensors")
    assert Cache(tmp_path).read("a") is None
    assert names(tmp_path) == ["a.pt"]


def test_eviction_spares_what_is_needed(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    sizes = [cache.write(key, TENSORS) for key in ("a", "b", "c", "d")]
    for age, key in enumerate(("d", "c", "b", "a")):
        os.utime(tmp_path / f"{key}.safetensors", (time.time() - 100 * (age + 1),) * 2)
    assert cache.read("a") is not None  # which makes it the one used last
    monkeypatch.setattr("autotune.data.cache.SIZE_LIMIT_BYTES", 2 * sizes[0])
    assert cache.evict(keep={"b"}) == 2
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    monkeypatch.setattr("autotune.data.cache.SIZE_LIMIT_BYTES", 0)
    assert cache.evict(keep={"a", "b"}) == 0


def test_full_disks_leave_nothing_half_written(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    cache = Cache(tmp_path)
    cache.write("a", TENSORS)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(AutotuneError, match="is full"):
        cache.write("b", TENSORS)
    assert names(tmp_path) == ["a.safetensors"]
