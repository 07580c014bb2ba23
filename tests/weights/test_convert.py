"""`autotune weights convert`, as it is called: whole models in shards, and adapters whose model
must be told."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from autotune.cli.weights import app
from autotune.errors import InvalidInput
from autotune.weights.adapters import Adapter, AdapterInfo, read_adapter, write_adapter
from autotune.weights.files import CorruptFile, MissingWeights, open_weights, read_header
from autotune.weights.joined_layers import LoraLayer
from autotune.weights.saving import save_file
from tests.weights.conftest import bits, read_all, save_model
from tests.weights.test_streaming import QWEN

INDEX = "diffusion_pytorch_model.safetensors.index.json"


def convert(source: Path, target: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["convert", str(source), str(target), *options])
    if result.exception:
        raise result.exception
    return result.stdout


def test_a_models_folder_is_written_in_shards_that_diffusers_loads_and_back_into_one_file(
    tmp_path: Path,
) -> None:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(**QWEN)
    model.save_pretrained(tmp_path / "in")
    out, whole = tmp_path / "out", tmp_path / "whole"
    told = convert(tmp_path / "in", out, "--max-shard-size", "50kB")
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2
    assert told.split()[0] == str(len(shards) + 1)
    for path in shards:
        file = read_header(path)
        assert len(file.entries) == 1 or sum(entry.size_bytes for entry in file.entries) <= 50_000
    loaded = QwenImageTransformer2DModel.from_pretrained(out).state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in model.state_dict().items())
    convert(out / INDEX, whole)
    assert sorted(path.name for path in whole.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    loaded = QwenImageTransformer2DModel.from_pretrained(whole).state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_every_dtype_metadata_and_the_name_of_a_text_encoders_files_stay(
    tmp_path: Path, every_dtype
) -> None:
    save_file(tmp_path / "in" / "model.safetensors", every_dtype, {"who": "me"})
    convert(tmp_path / "in", tmp_path / "out", "--max-shard-size", "100B")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert all(
        read_header(path).metadata["who"] == "me"
        for path in (tmp_path / "out").glob("*.safetensors")
    )
    loaded = read_all(open_weights(tmp_path / "out"))
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        n: bits(t) for n, t in every_dtype.items()
    }


@pytest.mark.parametrize(
    ("source", "target", "options", "error", "word"),
    [
        ("model", "out", ("--format", "kohya"), InvalidInput, "only adapters"),
        ("model", "model", (), InvalidInput, "read from"),
        ("model/" + INDEX, "other/../model", (), InvalidInput, "read from"),
        ("model", "out.safetensors", (), InvalidInput, "is a file"),
        ("model", "out", ("--max-shard-size", "ten"), InvalidInput, "not an amount"),
        ("pipeline", "out", (), InvalidInput, "whole pipeline"),
        ("model", "vae", (), InvalidInput, "holds another model"),
        ("adapter", "out", (), InvalidInput, "not a model"),
        ("empty", "out", (), MissingWeights, "no weights"),
        ("pipeline/model_index.json", "out", (), CorruptFile, "not an index of shards"),
    ],
)
def test_what_cannot_be_written_as_a_model_is_refused_and_nothing_is_written(
    tmp_path: Path,
    source: str,
    target: str,
    options: tuple[str, ...],
    error: type[InvalidInput],
    word: str,
) -> None:
    for folder in ("empty", "other", "pipeline"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    save_model(tmp_path / "model", {"a": torch.ones(9), "b": torch.ones(9)}, max_shard_bytes=40)
    lora = {
        "transformer.a.lora_A.weight": torch.ones(1, 2),
        "transformer.a.lora_B.weight": torch.ones(2, 1),
    }
    save_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors", lora)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=word) as caught:
        convert(tmp_path / source, tmp_path / target, *options)
    assert caught.value.hint
    assert sorted(tmp_path.rglob("*")) == before


ATTENTION = "transformer_blocks.3.attn.to_out.0"
"""A name that FLUX.1 and Qwen-Image share, of equally wide layers."""


@pytest.fixture
def ambiguous(tmp_path: Path) -> Path:
    layer = LoraLayer(torch.ones(2, 8), torch.ones(8, 2), 2.0)
    write_adapter(tmp_path / "in.safetensors", Adapter({ATTENTION: layer}, {}), "diffusers")
    return tmp_path / "in.safetensors"


@pytest.mark.parametrize("to", ["comfyui", "kohya"])
def test_an_adapter_that_may_be_of_two_models_is_written_once_its_model_is_told(
    ambiguous: Path, to: str
) -> None:
    out = ambiguous.parent / "out.safetensors"
    with pytest.raises(InvalidInput, match="may be for FLUX") as caught:
        convert(ambiguous, out, "--format", to)
    assert "--model" in caught.value.hint
    assert not out.exists()
    for model, name in (("flux1-dev", "double_blocks.3.img_attn.proj"), ("qwen-image", ATTENTION)):
        convert(ambiguous, out, "--format", to, "--model", model)
        written = name.replace(".", "_") if to == "kohya" else name
        assert any(written in key for key in read_header(out).by_name)
        assert list(read_adapter(out).layers) == [ATTENTION]


@pytest.mark.parametrize(
    ("transformer", "name"),
    [
        ("FluxTransformer2DModel", "double_blocks.3.img_attn.proj"),
        ("QwenImageTransformer2DModel", ATTENTION),
    ],
)
def test_the_class_that_a_file_names_decides_what_its_layers_do_not_tell(
    ambiguous: Path, transformer: str, name: str
) -> None:
    out = ambiguous.parent / "out.safetensors"
    info = AdapterInfo(
        model="x",
        transformer=transformer,
        plan_digest="sha256:0",
        rank=2,
        alpha=2.0,
        training_steps=1,
    )
    adapter = Adapter(read_adapter(ambiguous).layers, {"autotune": info.model_dump_json()})
    write_adapter(ambiguous, adapter, "diffusers")
    convert(ambiguous, out, "--format", "comfyui")
    assert any(name in key for key in read_header(out).by_name)
