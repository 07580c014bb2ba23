"""Every loader gives the very tensors that were saved, and lets go of files and buffers."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from autotune.weights import tensors as loaders
from autotune.weights.files import TruncatedFile, open_weights, read_header
from autotune.weights.tensors import LOADERS, read_tensor, save_file
from tests.weights.conftest import bits, read_all, save_model

CPU = torch.device("cpu")
USABLE = [name for name, loader in LOADERS.items() if loader.why_not(CPU) is None]
each_loader = pytest.mark.parametrize("name", USABLE)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, every_dtype):
    folder = tmp_path_factory.mktemp("sharded")
    save_model(folder, every_dtype, max_shard_bytes=100)
    return open_weights(folder)


def open_files():
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()}


@each_loader
def test_values_are_identical_to_the_bit(name, sharded, every_dtype):
    assert len(sharded.files) > 3
    loaded = read_all(sharded, loader=name)
    assert loaded.keys() == every_dtype.keys()
    for key, expected in every_dtype.items():
        assert (loaded[key].dtype, loaded[key].shape) == (expected.dtype, expected.shape), key
        assert bits(loaded[key]) == bits(expected), key
        assert loaded[key].device == CPU


@each_loader
def test_a_tensor_outlives_stream_and_file(name, tmp_path):
    original = torch.arange(100_000, dtype=torch.float32)
    save_file(tmp_path / "a.safetensors", {"a": original, "b": torch.zeros(1)})
    stream = LOADERS[name].stream(open_weights(tmp_path / "a.safetensors"), CPU)
    kept = next(tensor for key, tensor in stream if key == "a")
    stream.close()
    (tmp_path / "a.safetensors").unlink()
    gc.collect()
    assert kept.equal(original)


@each_loader
def test_loaded_tensors_leave_files_alone(name, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(path, {"a": torch.zeros(5000)})
    read_all(open_weights(path), loader=name)["a"].fill_(1)
    assert read_all(open_weights(path), loader=name)["a"].sum() == 0


@each_loader
@pytest.mark.parametrize("stop_after", [0, None])
def test_left_streams_release_everything(name, sharded, stop_after):
    before = open_files()
    stream = LOADERS[name].stream(sharded, CPU)
    for count, _ in enumerate(stream):
        if count == stop_after:
            break
    del _
    stream.close()
    gc.collect()
    assert open_files() <= before
    assert str(sharded.path) not in Path("/proc/self/maps").read_text()


@each_loader
def test_small_pieces_are_read_whole(name, tmp_path, monkeypatch):
    for limit, value in (("PIECE_BYTES", 300), ("CHUNK_BYTES", 1000)):
        monkeypatch.setattr(loaders, limit, value)
    tensors = {f"t{i:03}": torch.full((i * 7 % 300,), i, dtype=torch.int32) for i in range(200)}
    save_file(tmp_path / "many.safetensors", tensors)
    loaded = read_all(open_weights(tmp_path / "many.safetensors"), loader=name)
    assert all(loaded[key].equal(tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("reader", ["stream", "single"])
def test_shrinking_files_are_truncated(tmp_path, reader):
    path = tmp_path / "a.safetensors"
    save_file(path, {"a": torch.ones(1000)})
    source = open_weights(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(TruncatedFile):
        read_all(source) if reader == "stream" else read_tensor(*source.locations["a"])


def test_one_tensor_is_held(tmp_path, monkeypatch):
    tensors = {f"t{i}": torch.full((10_000,), float(i)) for i in range(20)}
    save_file(tmp_path / "a.safetensors", tensors)
    monkeypatch.setattr(loaders, "PIECE_BYTES", 3000)
    allocate, known, peak = loaders._allocate, [], 0

    def watched(entry):
        tensor, view = allocate(entry)
        known.append(weakref.ref(tensor))
        return tensor, view

    monkeypatch.setattr(loaders, "_allocate", watched)
    for _, tensor in LOADERS["pread"].stream(open_weights(tmp_path / "a.safetensors"), CPU):
        peak = max(peak, sum(reference() is not None for reference in tuple(known)))
        del tensor
    assert (peak, len(known)) == (1, 20)


def test_any_layout_is_stored(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {"whole": base, "tied": base, "transposed": base.t(), "row": base[1]}
    state["wide"] = base[:1].expand(2, 4)
    save_file(tmp_path / "a.safetensors", state)
    loaded = read_all(open_weights(tmp_path / "a.safetensors"))
    assert all(loaded[name].equal(tensor) for name, tensor in state.items())


def test_equal_content_gives_equal_bytes(tmp_path):
    metadata = {f"key {number}": '"\\ü\n\x1f' * number for number in range(8)}
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.bfloat16)}
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for file in files:
        save_file(file, tensors, metadata)
    assert len({file.read_bytes() for file in files}) == 1
    assert read_header(files[0]).metadata == {**metadata, "format": "pt"}
    loaded = read_all(open_weights(files[0]))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
