from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from autotune.cli.weights import app
from autotune.report.machine import weights_lines
from autotune.weights import tensors as inspection
from autotune.weights.files import CorruptFile
from autotune.weights.tensors import FileSummary, TensorSummary, inspect_file, save_file
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


def test_the_command_can_leave_values_unread(tmp_path, monkeypatch):
    save_file(tmp_path / "a.safetensors", {"a": torch.tensor([float("nan")])})
    run = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.safetensors")])
    assert "values that are not finite: 1" in run.output
    monkeypatch.setattr(inspection, "read_tensor", None)
    run = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.safetensors"), "--no-values"])
    assert (run.exit_code, "not counted" in run.output) == (0, True)


def test_progress_ends_at_the_whole(tmp_path):
    save_file(tmp_path / "a.safetensors", {"a": torch.ones(3), "b": torch.ones(1)})
    calls = []
    inspect_file(
        tmp_path / "a.safetensors", on_progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (16, 16)
    assert len(calls) == 2


def test_a_damaged_file_is_refused(tmp_path):
    with pytest.raises(CorruptFile):
        inspect_file(write_raw(tmp_path, "a.safetensors", raw_file({"a": 1})))


def test_handles_are_released(tmp_path):
    save_file(tmp_path / "a.safetensors", {"a": torch.ones(3)})
    before = len(list(Path("/proc/self/fd").iterdir()))
    inspect_file(tmp_path / "a.safetensors")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


tensors = st.builds(
    TensorSummary,
    name=st.text(max_size=120),
    dtype=st.sampled_from(["BF16", "F8_E4M3", "F8_E8M0"]),
    shape=st.lists(st.integers(0, 10**5), max_size=5).map(tuple),
    size_bytes=st.integers(0, 10**13),
    num_nan=st.integers(0, 10**9),
    num_inf=st.integers(0, 10**9),
)


@given(
    st.builds(
        FileSummary,
        name=st.text(max_size=150),
        size_bytes=st.integers(0, 10**13),
        metadata=st.dictionaries(st.text(max_size=50), st.text(max_size=200), max_size=3),
        tensors=st.lists(tensors, max_size=4).map(tuple),
    )
)
def test_no_line_is_wider_than_the_terminal_and_each_tensor_has_one(summary):
    lines = weights_lines(summary).split("\n")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 5 + len(summary.metadata) + len(summary.tensors)


def test_the_report_of_a_small_file_reads_like_this(tmp_path):
    state = {
        "blocks.0.to_q.lora_A.weight": torch.ones(4, 64, dtype=torch.bfloat16),
        "x": torch.tensor(float("nan")),
    }
    save_file(tmp_path / "a.safetensors", state, {"autotune": '{"rank": 4}'})
    text = weights_lines(inspect_file(tmp_path / "a.safetensors"))
    assert "tensors: 2 (1 BF16, 1 F32)" in text
    assert "values that are not finite: 1" in text
    assert 'metadata autotune: {"rank": 4}' in text
    rows = text.splitlines()[-2:]
    assert rows[0].split() == ["blocks.0.to_q.lora_A.weight", "BF16", "4x64", "512", "B"]
    assert rows[1].split() == ["x", "F32", "scalar", "4", "B", "1", "NaN"]
    assert rows[0].index("BF16") - rows[1].index("F32") == -1
