import pytest
import torch

from autotune.report.machine import weights_lines
from autotune.weights import tensors as inspection
from autotune.weights.files import CorruptFile
from autotune.weights.tensors import inspect_file, save_file
from tests.weights.conftest import raw_file, save_model, write_raw


def test_every_dtype_is_described_and_bad_values_are_counted(tmp_path, every_dtype):
    save_file(tmp_path / "a.safetensors", every_dtype, {"who": "me"})
    summary = inspect_file(tmp_path / "a.safetensors")
    found = {tensor.name: tensor for tensor in summary.tensors}
    assert summary.metadata == {"format": "pt", "who": "me"}
    assert summary.size_bytes == (tmp_path / "a.safetensors").stat().st_size
    assert (found["special"].num_nan, found["special"].num_inf) == (1, 2)
    assert summary.num_nonfinite == 3
    assert found["scalar"].shape == ()
    assert found["bfloat16"].size_bytes == 70


@pytest.mark.parametrize("named", ["transformer", "transformer/model.safetensors.index.json"])
def test_shards_are_described_as_one_model(tmp_path, named):
    tensors = {"a": torch.ones(3), "b": torch.tensor([float("nan")]), "c": torch.ones(2)}
    shards = save_model(tmp_path / "transformer", tensors, max_shard_bytes=12, stem="model")
    summary = inspect_file(tmp_path / named)
    assert [tensor.name for tensor in summary.tensors] == ["a", "b", "c"]
    assert (summary.num_nonfinite, summary.size_bytes) == (
        1,
        sum(shard.stat().st_size for shard in shards),
    )
    assert (summary.name, summary.metadata) == (named.rpartition("/")[2], {"format": "pt"})


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64]
)
def test_bad_values_are_found_in_every_piece(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(inspection, "PIECE_ELEMENTS", 4)
    values = torch.ones(10)
    values[[0, 4, 9]] = float("nan")
    save_file(tmp_path / "a.safetensors", {"a": values.to(dtype)})
    assert inspect_file(tmp_path / "a.safetensors").tensors[0].num_nan == 3


def test_without_values_only_the_header_is_read(tmp_path, monkeypatch):
    save_file(tmp_path / "a.safetensors", {"a": torch.ones(3)})
    monkeypatch.setattr(inspection, "read_tensor", None)
    summary = inspect_file(tmp_path / "a.safetensors", values=False)
    assert summary.num_nonfinite is None
    assert "not counted" in weights_lines(summary)


def test_a_damaged_file_is_refused(tmp_path):
    with pytest.raises(CorruptFile):
        inspect_file(write_raw(tmp_path, "a.safetensors", raw_file({"a": 1})))
