import json
import math
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from autotune.weights import files
from tests.weights.conftest import raw_file, write_raw

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def parse(content):
    with tempfile.TemporaryDirectory() as folder:
        return files.read_header(write_raw(Path(folder), "x.safetensors", content))


layouts = st.lists(
    st.tuples(st.sampled_from(sorted(files.DTYPES)), st.lists(st.integers(0, 5), max_size=4)),
    min_size=0,
    max_size=6,
)


@given(layouts, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), st.randoms())
def test_sound_headers_are_read_back(layout, metadata, random):
    header, position = {}, 0
    for number, (dtype, shape) in enumerate(layout):
        end = position + math.prod(shape) * files.DTYPES[dtype][1]
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    names = list(header)
    random.shuffle(names)
    shuffled = {name: header[name] for name in names}
    file = parse(raw_file({"__metadata__": metadata, **shuffled}, bytes(position)))
    entries, first = file.entries, file.size_bytes - position
    assert file.metadata == metadata
    assert {entry.name for entry in entries} == header.keys()
    for entry in entries:
        stored = header[entry.name]
        assert (entry.dtype, list(entry.shape)) == (stored["dtype"], stored["shape"])
        assert entry.start == first + stored["data_offsets"][0]
    assert [e.start for e in entries] == sorted(e.start for e in entries)
    assert sum(e.size_bytes for e in entries) == position


@given(st.binary(max_size=200))
def test_random_headers_raise_typed_errors(noise):
    with pytest.raises(files.BadWeights):
        parse(raw_file(noise, bytes(1)))


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_changed_bytes_stay_consistent(position, value):
    header = {"a": A, "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}}
    content = bytearray(raw_file(header, bytes(16)))
    text = json.dumps(header)
    content[8 + position % len(text)] = value
    try:
        file = parse(bytes(content))
    except files.BadWeights:
        return
    assert sum(entry.size_bytes for entry in file.entries) == 16


LONG = (b'{"a":' * 100_000, {"a": {**A, "shape": [2**62] * 500_000}})  # a product of minutes
IMPOSSIBLE = yaml.safe_load((Path(__file__).parent / "headers.yaml").read_text())


@pytest.mark.parametrize("header", [*(text.encode("latin-1") for text in IMPOSSIBLE), *LONG])
def test_impossible_headers_are_corrupt(header):
    with pytest.raises(files.CorruptFile) as caught:
        parse(raw_file(header, bytes(20)))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("entry", "num_bytes"),
    [
        ({"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}, 2),
        ({"dtype": "F32", "shape": [0] * 65, "data_offsets": [0, 0]}, 0),
        ({"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}, 0),
    ],
)
def test_oversized_tensors_are_refused(entry, num_bytes):
    with pytest.raises(files.CorruptFile, match="torch cannot hold"):
        parse(raw_file({"a": entry}, bytes(num_bytes)))


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_a_file_cut_anywhere_is_truncated(tmp_path, length):
    whole = raw_file({"a": A}, bytes(8))
    path = write_raw(tmp_path, "cut.safetensors", whole[: min(length, len(whole) - 1)])
    with pytest.raises(files.TruncatedFile):
        files.read_header(path)


def test_long_headers_are_not_read(tmp_path):
    content = raw_file(b"{}", length=files.MAX_HEADER_BYTES + 1)
    path = write_raw(tmp_path, "huge.safetensors", content)
    with pytest.raises(files.CorruptFile):
        files.read_header(path)


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt", ".pth"])
def test_pickles_are_refused(tmp_path, suffix):
    with pytest.raises(files.PickledWeights) as caught:
        files.read_header(write_raw(tmp_path, "old" + suffix, b"\x80\x04"))
    assert "delete it" in caught.value.hint


STEM = "diffusion_pytorch_model"


def tensor(start=0):
    return {"dtype": "U8", "shape": [2], "data_offsets": [start, start + 2]}


def shards(folder, weight_map):
    write_raw(folder, f"{STEM}-1.safetensors", raw_file({"b": tensor(0), "a": tensor(2)}, bytes(4)))
    write_raw(folder, f"{STEM}-2.safetensors", raw_file({"c": tensor()}, bytes(2)))
    index = json.dumps({"weight_map": weight_map}).encode()
    write_raw(folder, f"{STEM}.safetensors.index.json", index)
    return folder


GOOD = {"a": f"{STEM}-1.safetensors", "b": f"{STEM}-1.safetensors", "c": f"{STEM}-2.safetensors"}


def test_shards_are_one_source(tmp_path):
    source = files.open_weights(shards(tmp_path, GOOD))
    assert list(source.locations) == ["b", "a", "c"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", f"{STEM}.safetensors", f"{STEM}.fp16.safetensors"]
)
def test_single_files_are_found(tmp_path, name):
    write_raw(tmp_path, name, raw_file({"a": tensor()}, bytes(2)))
    assert list(files.open_weights(tmp_path).locations) == ["a"]
    assert list(files.open_weights(tmp_path / name).locations) == ["a"]


ELSEWHERE = ["../x", "/etc/passwd", "sub/x", "..\\x", "C:x", "x\0"]


@pytest.mark.parametrize(
    "shard", [*(f"{name}.safetensors" for name in ELSEWHERE), "x.bin", "", ".."]
)
def test_index_that_points_elsewhere_is_refused(tmp_path, shard):
    write_raw(tmp_path.parent, "x.safetensors", raw_file({"a": tensor()}, bytes(2)))
    with pytest.raises(files.CorruptFile):
        files.open_weights(shards(tmp_path, {**GOOD, "a": shard}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_a_damaged_index_is_refused(tmp_path, text):
    shards(tmp_path, GOOD)
    (tmp_path / f"{STEM}.safetensors.index.json").write_text(text)
    with pytest.raises(files.CorruptFile):
        files.open_weights(tmp_path)


def test_mismatched_indices_are_refused(tmp_path):
    with pytest.raises(files.CorruptFile, match="'z'"):
        files.open_weights(shards(tmp_path, {**GOOD, "z": f"{STEM}-2.safetensors"}))
