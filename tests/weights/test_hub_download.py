"""What really comes over the wire, from a hub of our own."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from autotune.errors import AutotuneError, InvalidInput
from autotune.models.resolve import fetch as fetch_whole
from autotune.models.resolve import fetch_model, resolve_model
from autotune.plan.job import ModelRef
from autotune.weights.files import HubError, MissingWeights
from autotune.weights.hub import fetch
from tests.models.conftest import one_thread, small_pipelines  # noqa: F401 - fixtures
from tests.weights.fake_hub import COMMIT, FakeHub, hub_in_this_process

STEM = "diffusion_pytorch_model"
SIZE = 1 << 16


@pytest.fixture
def hub(tmp_path):
    with hub_in_this_process(tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def repo(hub: FakeHub, tmp_path: Path) -> str:
    folder = tmp_path / "repo"
    for name in ("model_index.json", "vae/config.json", "README.md", "tokenizer/vocab.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"I am": name}))  # equal files are fetched once
    for name in (f"{STEM}.safetensors", f"{STEM}.fp16.safetensors", "more.bin"):
        (folder / "vae" / name).write_bytes(os.urandom(SIZE))
    hub.repos["team/small"] = folder
    return "team/small"


def test_only_needed_files_are_downloaded_and_only_once(hub: FakeHub, repo: str) -> None:
    fetched = fetch(repo, components=["vae"])
    assert fetched.name == COMMIT
    assert sorted(hub.downloads) == [
        "model_index.json",
        "vae/config.json",
        f"vae/{STEM}.safetensors",
    ]
    assert fetch(repo, components=["vae"]) == fetched
    assert len(hub.downloads) == 3


def test_without_weights_only_texts_come_and_weights_may_follow(hub: FakeHub, repo: str) -> None:
    fetch(repo, components=["vae", "tokenizer"], weights=False)
    assert sorted(hub.downloads) == ["model_index.json", "tokenizer/vocab.json", "vae/config.json"]
    fetch(repo, revision=COMMIT, components=["vae", "tokenizer"])
    assert hub.downloads[3:] == [f"vae/{STEM}.safetensors"]


def test_a_download_that_breaks_off_asks_for_the_rest_and_ends_whole(
    hub: FakeHub, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(
        constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12
    )  # of what has come, whole chunks are kept
    hub.break_once.add(f"vae/{STEM}.safetensors")
    fetched = fetch(repo, components=["vae"])
    name = f"vae/{STEM}.safetensors"
    assert (fetched / name).read_bytes() == (hub.repos[repo] / name).read_bytes()
    ranges = [asked for verb, path, asked in hub.requests if verb == "GET" and path.endswith(name)]
    assert ranges == [None, f"bytes={SIZE // 2}-"]


def test_a_disk_that_becomes_full_during_a_download_is_no_broken_connection(
    repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "blob")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(HubError, match="No space left") as caught:
        fetch(repo, components=["vae"])
    assert "HF_HOME" in caught.value.hint


def test_a_disk_without_room_is_told_before_anything_is_downloaded(
    hub: FakeHub, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = shutil._ntuple_diskusage(SIZE, 0, SIZE - 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    with pytest.raises(AutotuneError, match="team/small needs") as caught:
        fetch(repo, components=["vae"])
    assert "HF_HOME" in caught.value.hint
    assert not hub.downloads


def test_a_license_that_is_not_accepted_is_told_before_anything_is_downloaded(
    hub: FakeHub, repo: str
) -> None:
    hub.gated.add(repo)
    with pytest.raises(HubError, match="license"):
        fetch(repo, components=["vae"])
    assert not hub.downloads


def test_a_whole_model_is_verified_and_a_damaged_file_fetched_anew(
    hub: FakeHub,
    small_pipelines,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    from autotune.cli.app import app

    hub.repos["team/small"] = small_pipelines("flux1-dev").folder
    fetched = fetch_whole("team/small")
    files = [path for path in fetched.folder.rglob("*") if path.is_file()]
    assert (fetched.family, fetched.revision, fetched.num_verified) == (
        "flux1-dev",
        COMMIT,
        len(files),
    )
    damaged = fetched.folder / "vae" / f"{STEM}.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(HubError, match=r"vae/\S+ of team/small did not have"):
        fetch_whole("team/small")
    hub.requests.clear()
    assert fetch_whole("team/small").num_verified == len(files)
    assert hub.downloads == [f"vae/{STEM}.safetensors"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_whole("team/small") == fetched.changed(num_verified=None)
    app(["fetch", "--model", "team/small", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["revision"] == COMMIT
    with pytest.raises(InvalidInput, match="nothing to fetch"):
        fetch_whole(str(fetched.folder))


def test_offline_the_missing_file_of_a_model_is_named(
    hub: FakeHub, small_pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.repos["team/small"] = small_pipelines("qwen-image").folder
    texts = fetch_model(ModelRef.of("team/small"), weights=False)
    assert (texts.folder, texts.revision, texts.spec.name) == (None, COMMIT, "team/small")
    assert texts.config_folder is not None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model(ModelRef.of(f"team/small@{COMMIT}"), weights=False) == texts
    with pytest.raises(
        MissingWeights, match=r"transformer/\*.safetensors of team/small is not in the cache"
    ):
        fetch_model(ModelRef.of("team/small"))
    with pytest.raises(InvalidInput, match="neither a folder nor a known model"):
        resolve_model(ModelRef.of("team/never-fetched"))


def test_a_model_of_an_unknown_name_is_what_its_repository_says(
    hub: FakeHub, small_pipelines
) -> None:
    small = small_pipelines("flux1-dev")
    hub.repos["someone/fine-tune"] = small.folder
    model = fetch_model(ModelRef.of("someone/fine-tune"))
    assert model.family.name == "flux1-dev"
    assert model.spec.architecture == resolve_model(ModelRef.of(small.folder)).spec.architecture
    assert resolve_model(ModelRef.of(f"someone/fine-tune@{COMMIT}")) == model
    assert resolve_model(ModelRef.of("someone/fine-tune")).folder == model.folder
