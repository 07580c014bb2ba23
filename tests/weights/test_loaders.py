"""One contract for every loader in the registry."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from autotune.weights import tensors as loaders
from autotune.weights.files import TruncatedFile, open_weights
from autotune.weights.tensors import LOADERS, read_tensor, save_file
from tests.weights.conftest import bits, read_all, save_model

CPU = torch.device("cpu")
USABLE = [name for name, loader in LOADERS.items() if loader.why_not(CPU) is None]
pytestmark = pytest.mark.parametrize("name", USABLE)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, every_dtype):
    folder = tmp_path_factory.mktemp("sharded")
    save_model(folder, every_dtype, max_shard_bytes=100)
    return open_weights(folder)


def open_files() -> set[str]:
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()}


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_values_dtypes_and_shapes_are_identical_to_the_bit(name, sharded, every_dtype):
    assert len(sharded.files) > 3
    loaded = read_all(sharded, loader=name)
    assert loaded.keys() == every_dtype.keys()
    for key, expected in every_dtype.items():
        assert (loaded[key].dtype, loaded[key].shape) == (expected.dtype, expected.shape), key
        assert bits(loaded[key]) == bits(expected), key
        assert loaded[key].device == CPU


def test_a_tensor_stays_good_after_the_stream_and_the_file_are_gone(name, tmp_path):
    original = torch.arange(100_000, dtype=torch.float32)
    save_file(tmp_path / "a.safetensors", {"a": original, "b": torch.zeros(1)})
    stream = LOADERS[name].stream(open_weights(tmp_path / "a.safetensors"), CPU)
    kept = next(tensor for key, tensor in stream if key == "a")
    stream.close()
    (tmp_path / "a.safetensors").unlink()
    gc.collect()
    assert kept.equal(original)


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(name, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(path, {"a": torch.zeros(5000)})
    read_all(open_weights(path), loader=name)["a"].fill_(1)
    assert read_all(open_weights(path), loader=name)["a"].sum() == 0


@pytest.mark.parametrize("stop_after", [0, 1, None])
def test_handles_and_buffers_are_released_also_when_the_stream_is_left_early(
    name, sharded, stop_after
):
    before = open_files()
    stream = LOADERS[name].stream(sharded, CPU)
    for count, (_, tensor) in enumerate(stream):
        del tensor, _
        if count == stop_after:
            break
    stream.close()
    gc.collect()
    assert open_files() <= before
    assert str(sharded.path) not in mapped_files()


def test_tensors_that_the_index_leaves_out_are_not_given(name, tmp_path):
    save_model(tmp_path, {"a": torch.ones(9), "b": torch.ones(9)}, max_shard_bytes=40)
    shard = tmp_path / "diffusion_pytorch_model-00001-of-00002.safetensors"
    save_file(shard, {"a": torch.ones(9), "stray": torch.ones(9)})
    assert set(read_all(open_weights(tmp_path), loader=name)) == {"a", "b"}


def test_many_tensors_in_small_pieces_are_read_whole(name, tmp_path, monkeypatch):
    for limit, value in (("PIECE_BYTES", 300), ("CHUNK_BYTES", 1000)):
        monkeypatch.setattr(loaders, limit, value)
    tensors = {f"t{i:03}": torch.full((i * 7 % 300,), i, dtype=torch.int32) for i in range(200)}
    save_file(tmp_path / "many.safetensors", tensors)
    loaded = read_all(open_weights(tmp_path / "many.safetensors"), loader=name)
    assert all(loaded[key].equal(tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("reader", ["stream", "single"])
def test_a_file_that_shrinks_while_it_is_read_is_truncated(name, tmp_path, reader):
    if name != "pread":
        pytest.skip("a map of a file that shrinks raises SIGBUS; nothing in Python can catch that")
    path = tmp_path / "a.safetensors"
    save_file(path, {"a": torch.ones(1000)})
    source = open_weights(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(TruncatedFile):
        read_all(source, loader=name) if reader == "stream" else read_tensor(*source.locations["a"])


def test_nothing_is_held_besides_the_tensor_in_use(name, tmp_path, monkeypatch):
    if name != "pread":
        pytest.skip("a map holds nothing, and fastsafetensors holds its chunk outside Python")
    save_file(
        tmp_path / "a.safetensors", {f"t{i}": torch.full((10_000,), float(i)) for i in range(20)}
    )
    monkeypatch.setattr(loaders, "PIECE_BYTES", 3000)
    allocate, known, peak = loaders._allocate, [], 0

    def watched(entry):
        tensor, view = allocate(entry)
        known.append(weakref.ref(tensor))
        return tensor, view

    monkeypatch.setattr(loaders, "_allocate", watched)
    for _, tensor in LOADERS[name].stream(open_weights(tmp_path / "a.safetensors"), CPU):
        peak = max(peak, sum(reference() is not None for reference in tuple(known)))
        del tensor
    assert (peak, len(known)) == (1, 20)
