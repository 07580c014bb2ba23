import errno
import resource

import pytest
import torch

from autotune.weights.files import open_weights, read_header
from autotune.weights.tensors import save_file
from tests.weights.conftest import bits, read_all


def test_what_is_saved_is_read_back_to_the_bit_with_its_metadata(tmp_path, every_dtype):
    save_file(tmp_path / "new" / "a.safetensors", every_dtype, {"key": "value"})
    assert read_header(tmp_path / "new" / "a.safetensors").metadata == {
        "format": "pt",
        "key": "value",
    }
    loaded = read_all(open_weights(tmp_path / "new" / "a.safetensors"))
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        n: bits(t) for n, t in every_dtype.items()
    }


def test_tensors_of_any_layout_are_stored_and_ties_under_each_name(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "whole": base,
        "tied": base,
        "transposed": base.t(),
        "row": base[1],
        "wide": base[:1].expand(2, 4),
    }
    save_file(tmp_path / "a.safetensors", state)
    loaded = read_all(open_weights(tmp_path / "a.safetensors"))
    assert all(loaded[name].equal(tensor) for name, tensor in state.items())


def test_a_limit_of_the_system_is_an_error_of_the_system_that_names_the_file(tmp_path):
    path, limits = tmp_path / "a.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_file(path, {"a": torch.ones(9999)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert not list(tmp_path.iterdir())


def test_a_failing_save_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(path, {"a": torch.ones(2)})
    with pytest.raises(Exception, match=r".+"):
        save_file(path, {"a": torch.zeros(2)}, {"key": 1})  # type: ignore[dict-item]
    assert read_all(open_weights(path))["a"].sum() == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


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
