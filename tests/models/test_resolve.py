import json
import os
import shutil

import pytest
import torch

from autotune.data.encode import Encoders
from autotune.errors import InvalidInput
from autotune.models.latents import count_tokens
from autotune.models.registry import FAMILIES
from autotune.models.resolve import check_weights, fetch_model, read_parts, resolve_model
from autotune.plan.candidate import CachingSettings
from autotune.plan.job import ModelRef
from autotune.weights.empty import build_empty_component
from autotune.weights.files import open_weights, read_config
from tests.kinds import KINDS
from tests.weights.fake_hub import hub_in_this_process


@pytest.fixture
def folder(small_pipelines, tmp_path):
    return shutil.copytree(
        small_pipelines("qwen-image").folder,
        tmp_path / "model",
        ignore=shutil.ignore_patterns("*.safetensors"),
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "null", "[" * 9999])
@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json"])
def test_damaged_configurations_name_their_file(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(InvalidInput, match=r"\.json"):
        resolve_model(ModelRef.of(folder))


@pytest.mark.parametrize(
    "config",
    [
        {"num_layers": "many"},
        {"no_such_argument": 1},
        {"axes_dims_rope": [1, 2, 3]},
        {"num_layers": -1},
        {"num_attention_heads": 10**15},
    ],
)
def test_unbuildable_configurations_are_refused(folder, config):
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=r"does not build|more than any|without blocks"):
        assert resolve_model(ModelRef.of(folder)).spec


def write_config(folder, part, **changes):
    change_json(folder / part / "config.json", changes)


def change_json(path, changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize("value", ["owner/repo@sha", "flash_attention_2", {"": "a/b"}])
def test_a_configuration_chooses_no_native_code(folder, monkeypatch, name, value, is_nested):
    monkeypatch.setattr("transformers.modeling_utils.is_kernel", pytest.fail)
    vision = json.loads((folder / "text_encoder" / "config.json").read_text())["vision_config"]
    changes = {"vision_config": {**vision, name: value}} if is_nested else {name: value}
    write_config(folder, "text_encoder", **changes)
    with pytest.raises(InvalidInput, match="not part of transformers"):
        build_empty_component(folder, "text_encoder", dtype=torch.float32)


def test_configurations_replace_themselves_never(folder):
    write_config(folder, "text_encoder", configuration_files=["config.4.0.0.json"])
    part = folder / "text_encoder"
    shutil.copy(part / "config.json", part / "config.4.0.0.json")
    with pytest.raises(InvalidInput, match="replaces itself"):
        build_empty_component(folder, "text_encoder", dtype=torch.float32)


CODE = "from pathlib import Path\nPath({ran!r}).touch()\nclass Evil: pass\n"


@pytest.mark.quick(*KINDS, "kandinsky5-video-lite")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_model_folders_run_no_code(small_pipelines, tmp_path, monkeypatch, family):
    """A file beside every configuration, which names it in every way that the libraries know."""
    monkeypatch.setattr("builtins.input", pytest.fail)
    folder = shutil.copytree(small_pipelines(family).folder, tmp_path / "model")
    ran, kinds = tmp_path / "ran", ("Config", "Model", "Processor", "ImageProcessor")
    auto_map = {f"Auto{kind}": "evil.Evil" for kind in kinds}
    auto_map["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]
    for path in folder.rglob("*.json"):
        (path.parent / "evil.py").write_text(CODE.format(ran=str(ran)))
        data = json.loads(path.read_text())
        takes_unknown_keys = path.parent.name != FAMILIES[family].denoiser
        if path.name.endswith("config.json") and takes_unknown_keys:
            path.write_text(json.dumps({**data, "auto_map": auto_map, "trust_remote_code": True}))
    model = resolve_model(ModelRef.of(folder))
    read_parts(model)
    encoders = Encoders(model, CachingSettings(), torch.device("cpu"), "fp32")
    encoders.load_pipeline()
    if (folder / "tokenizer" / "tokenizer_config.json").exists():
        count_tokens(folder, ["a"])
    assert not ran.exists()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (["transformers", "AutoTokenizer"], "takes its code from the files"),
        (["os", "system"], "comes from"),
        ([], "comes from"),
        ([["x"], "y"], "comes from"),
        ([1, "x"], "comes from"),
    ],
)
def test_foreign_parts_are_refused(folder, entry, reason):
    change_json(folder / "model_index.json", {"tokenizer": entry})
    with pytest.raises(InvalidInput, match=rf"tokenizer in .* {reason}"):
        resolve_model(ModelRef.of(folder))


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("text_encoder", {"vision_config": {"depth": 10**8}}),
        ("text_encoder", {"max_position_embeddings": 10**12}),
        ("transformer", {"num_attention_heads": 10**9}),
        ("transformer", {"axes_dims_rope": [1] * 2000}),
        ("vae", {"dim_mult": [[1] * 2000]}),
    ],
)
def test_counts_are_allocated_bounded(folder, part, changes):
    write_config(folder, part, **changes)
    with pytest.raises(InvalidInput, match="more than any model has"):
        read_config(folder / part / "config.json")


def test_moderate_products_are_stopped(folder, monkeypatch):
    monkeypatch.setattr("autotune.weights.empty.MAX_TENSORS", 30)
    write_config(folder, "transformer", num_layers=3)  # no other test has seen it built
    with pytest.raises(InvalidInput, match="over 30 tensors"):
        assert resolve_model(ModelRef.of(folder)).spec
    with pytest.raises(InvalidInput, match="over 30 tensors"):
        build_empty_component(folder, "vae", dtype=torch.float32)


@pytest.mark.parametrize("content", ["zero", "pipe", "sparse"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.fp16.json"])
def test_what_never_ends_is_not_read(folder, name, content):
    path = folder / "transformer" / name
    path.unlink(missing_ok=True)
    if content == "zero":
        path.symlink_to("/dev/zero")
    elif content == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 20 << 30)
    with pytest.raises(InvalidInput, match=r"not a regular file|larger than"):
        read_config(path) if name == "config.json" else open_weights(path.parent)


@pytest.mark.parametrize(
    "name", ["tokenizer/tokenizer.json", "tokenizer/any.model", "scheduler/scheduler_config.json"]
)
def test_whole_files_are_bounded(folder, name):
    (folder / name).write_bytes(b"")
    os.truncate(folder / name, 20 << 30)
    with pytest.raises(InvalidInput, match="larger than"):
        resolve_model(ModelRef.of(folder))


@pytest.mark.parametrize(
    ("vae", "config"),
    [("NoSuchVae", {}), ("utils", {}), ("UNet2DModel", {"block_out_channels": "x"})],
)
def test_unbuildable_autoencoders_are_refused(small_pipelines, tmp_path, vae, config):
    folder = shutil.copytree(small_pipelines("qwen-image").folder, tmp_path / "model")
    change_json(folder / "model_index.json", {"vae": ["diffusers", vae]})
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=f"does not build a {vae}"):
        read_parts(resolve_model(ModelRef.of(folder)))


@pytest.mark.parametrize("revision", ["../../../x", "a/../../b", "/etc", "", "a b", "\x1b[2J"])
def test_revision_leads_nowhere_out_of_cache(revision):
    for find in (resolve_model, fetch_model):
        with pytest.raises(InvalidInput, match="is not a revision of"):
            find(ModelRef.of(f"Qwen/Qwen-Image@{revision}"))


def test_pipelines_of_blocks_load_alone(small_pipelines, tmp_path):
    small = small_pipelines("anima")
    repo = shutil.copytree(small.folder, tmp_path / "repo")
    index = json.loads((repo / "modular_model_index.json").read_text())
    for entry in index.values():
        if isinstance(entry, list):  # as saved by who had not loaded it, from elsewhere
            entry[:2], entry[2]["pretrained_model_name_or_path"] = (None, None), "team/other"
    (repo / "modular_model_index.json").write_text(json.dumps(index))
    with hub_in_this_process(tmp_path / "cache") as hub:
        hub.repos["team/anima"] = repo
        model = fetch_model(ModelRef.of("team/anima"))
        assert resolve_model(ModelRef.of("team/anima")) == model
    check_weights(model)
    assert model.family.name == "anima"
    pipeline = model.family.load_pipeline(model.weights)
    assert all(getattr(pipeline, name) for name in model.family.components)
