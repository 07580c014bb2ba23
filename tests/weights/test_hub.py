"""Files of a repository: which are fetched, what comes over the wire, what is said offline."""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants, errors
from hypothesis import given, strategies as st

from autotune.errors import AutotuneError, InvalidInput
from autotune.models.resolve import fetch as fetch_whole, fetch_model, resolve_model
from autotune.plan.job import ModelRef
from autotune.weights.files import BadWeights, HubError, MissingWeights, PickledWeights
from autotune.weights.hub import fetch, select_files
from tests.models.conftest import one_thread, small_pipelines  # noqa: F401 - fixtures
from tests.weights.fake_hub import COMMIT, hub_in_this_process

STEM = "diffusion_pytorch_model"
WEIGHTS = f"vae/{STEM}.safetensors"
SIZE = 1 << 16

QWEN = yaml.safe_load((Path(__file__).parent / "repository.yaml").read_text())
SHARDS = {name for name in QWEN if "-of-" in name}


def test_only_files_of_components_are_chosen():
    chosen = set(select_files(QWEN, ["transformer", "tokenizer", "scheduler"]))
    parts = ("tokenizer/", "scheduler/", "transformer/config", f"transformer/{STEM}.safetensors")
    assert chosen == {"model_index.json", *(name for name in QWEN if name.startswith(parts))}


def test_shards_come_with_their_index():
    variant = [shard.replace(".safetensors", ".fp16.safetensors") for shard in SHARDS]
    index = "text_encoder/model.safetensors.index"
    chosen = select_files([*QWEN, *variant, f"{index}.fp16.json"], ["text_encoder"])
    assert {name for name in chosen if "safetensors" in name} == {*SHARDS, f"{index}.json"}


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (["vae/config.json"], MissingWeights),
        (["unet/config.json"], MissingWeights),
        (["vae/config.json", f"vae/{STEM}.bin"], PickledWeights),
        (["vae/config.json", "vae/a.fp16.safetensors", "vae/b.fp32.safetensors"], MissingWeights),
    ],
)
def test_components_without_readable_weights_are_refused(files, error):
    with pytest.raises(error) as caught:
        select_files(files, ["vae"])
    assert caught.value.hint


@given(
    st.lists(st.sampled_from(QWEN)),
    st.lists(st.sampled_from(["transformer", "vae", "text_encoder", "tokenizer"])),
)
def test_chosen_files_are_no_pickles(files, components):
    try:
        chosen = select_files(files, components)
    except BadWeights:
        return
    assert set(chosen) <= set(files)
    assert not [name for name in chosen if name.endswith((".bin", ".ckpt", ".png"))]


@pytest.fixture
def hub(tmp_path):
    with hub_in_this_process(tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def repo(hub, tmp_path):
    folder = tmp_path / "repo"
    for name in ("model_index.json", "vae/config.json", "README.md", "tokenizer/vocab.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"I am": name}))  # equal files are fetched once
    for name in (f"{STEM}.safetensors", f"{STEM}.fp16.safetensors", "more.bin"):
        (folder / "vae" / name).write_bytes(os.urandom(SIZE))
    hub.repos["team/small"] = folder
    return "team/small"


def test_needed_files_are_downloaded_once(hub, repo):
    fetched = fetch(repo, components=["vae"])
    assert fetched.name == COMMIT
    assert sorted(hub.downloads) == ["model_index.json", "vae/config.json", WEIGHTS]
    assert fetch(repo, components=["vae"]) == fetched
    assert len(hub.downloads) == 3


def test_broken_downloads_end_whole(hub, repo, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)  # whole chunks are kept
    hub.break_once.add(WEIGHTS)
    fetched = fetch(repo, components=["vae"])
    assert (fetched / WEIGHTS).read_bytes() == (hub.repos[repo] / WEIGHTS).read_bytes()
    asked = [each for each in hub.requests if each[0] == "GET" and each[1].endswith(WEIGHTS)]
    ranges = [each[2] for each in asked]
    assert ranges == [None, f"bytes={SIZE // 2}-"]


def test_full_disks_are_told_first(hub, repo, monkeypatch):
    room = shutil._ntuple_diskusage(SIZE, 0, SIZE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    with pytest.raises(AutotuneError, match="team/small needs") as caught:
        fetch(repo, components=["vae"])
    assert "HF_HOME" in caught.value.hint
    assert not hub.downloads


def test_damaged_files_are_fetched_anew(hub, small_pipelines, monkeypatch, capsys):
    from autotune.cli.app import app

    hub.repos["team/small"] = small_pipelines("flux1-dev").folder
    fetched = fetch_whole("team/small")
    files = [path for path in fetched.folder.rglob("*") if path.is_file()]
    assert (fetched.family, fetched.revision) == ("flux1-dev", COMMIT)
    assert fetched.num_verified == len(files)
    damaged = fetched.folder / "vae" / f"{STEM}.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(HubError, match=r"vae/\S+ of team/small did not have"):
        fetch_whole("team/small")
    hub.requests.clear()
    assert fetch_whole("team/small").num_verified == len(files)
    assert hub.downloads == [WEIGHTS]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_whole("team/small") == fetched.changed(num_verified=None)
    app(["fetch", "--model", "team/small", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["revision"] == COMMIT
    with pytest.raises(InvalidInput, match="nothing to fetch"):
        fetch_whole(str(fetched.folder))


def test_unknown_repositories_tell_their_model(hub, small_pipelines):
    small = small_pipelines("flux1-dev")
    hub.repos["someone/fine-tune"] = small.folder
    model = fetch_model(ModelRef.of("someone/fine-tune"))
    assert model.family.name == "flux1-dev"
    assert model.spec.architecture == resolve_model(ModelRef.of(small.folder)).spec.architecture
    assert resolve_model(ModelRef.of(f"someone/fine-tune@{COMMIT}")) == model
    assert resolve_model(ModelRef.of("someone/fine-tune")).folder == model.folder


@pytest.mark.parametrize("is_offline", [True, False])
def test_complete_caches_serve_offline(hub, repo, monkeypatch, is_offline):
    folder = fetch(repo, components=["vae", "tokenizer"])
    if is_offline:
        refused = Mock(side_effect=errors.OfflineModeIsEnabled("offline"))
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refused)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch(repo, components=["vae", "tokenizer"]) == folder
    for lost in (WEIGHTS, "vae/config.json", "model_index.json"):
        (folder / lost).unlink()
        with pytest.raises(MissingWeights) as caught:
            fetch(repo, components=["vae"])
        assert lost.replace(STEM, "*") in caught.value.message
