import json

import pytest

from autotune.weights.files import CorruptFile, PickledWeights, open_weights
from tests.weights.conftest import raw_file, write_raw

STEM = "diffusion_pytorch_model"


def tensor(start=0):
    return {"dtype": "U8", "shape": [2], "data_offsets": [start, start + 2]}


def shards(folder, weight_map):
    write_raw(folder, f"{STEM}-1.safetensors", raw_file({"b": tensor(0), "a": tensor(2)}, bytes(4)))
    write_raw(folder, f"{STEM}-2.safetensors", raw_file({"c": tensor()}, bytes(2)))
    write_raw(
        folder, f"{STEM}.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode()
    )
    return folder


GOOD = {"a": f"{STEM}-1.safetensors", "b": f"{STEM}-1.safetensors", "c": f"{STEM}-2.safetensors"}


def test_shards_are_one_source_in_reading_order(tmp_path):
    source = open_weights(shards(tmp_path, GOOD))
    assert list(source.locations) == ["b", "a", "c"]


def test_tensors_outside_the_index_are_not_part_of_the_model(tmp_path):
    source = open_weights(
        shards(tmp_path, {"c": f"{STEM}-2.safetensors", "a": f"{STEM}-1.safetensors"})
    )
    assert list(source.locations) == ["a", "c"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", f"{STEM}.safetensors", f"{STEM}.fp16.safetensors"]
)
def test_a_single_file_is_found_under_each_usual_name(tmp_path, name):
    write_raw(tmp_path, name, raw_file({"a": tensor()}, bytes(2)))
    assert list(open_weights(tmp_path).locations) == ["a"]
    assert list(open_weights(tmp_path / name).locations) == ["a"]


def test_the_plain_file_wins_over_a_variant(tmp_path):
    write_raw(tmp_path, f"{STEM}.fp16.safetensors", raw_file({"half": tensor()}, bytes(2)))
    write_raw(tmp_path, f"{STEM}.safetensors", raw_file({"plain": tensor()}, bytes(2)))
    assert list(open_weights(tmp_path).locations) == ["plain"]


@pytest.mark.parametrize(
    "shard",
    ["../secret.safetensors", "/etc/passwd.safetensors", "sub/x.safetensors", "..\\x.safetensors",
    "C:x.safetensors",
     "x\0.safetensors", "x.bin", "", ".."],
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(tmp_path, shard):
    write_raw(tmp_path.parent, "secret.safetensors", raw_file({"a": tensor()}, bytes(2)))
    with pytest.raises(CorruptFile):
        open_weights(shards(tmp_path, {**GOOD, "a": shard}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_a_damaged_index_is_refused(tmp_path, text):
    shards(tmp_path, GOOD)
    (tmp_path / f"{STEM}.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFile):
        open_weights(tmp_path)


def test_an_index_that_does_not_match_its_shards_is_refused(tmp_path):
    with pytest.raises(CorruptFile, match="'z'"):
        open_weights(shards(tmp_path, {**GOOD, "z": f"{STEM}-2.safetensors"}))


def test_a_folder_with_pickles_only_is_refused_as_such(tmp_path):
    write_raw(tmp_path, f"{STEM}.bin", b"\x80\x04")
    with pytest.raises(PickledWeights):
        open_weights(tmp_path)
