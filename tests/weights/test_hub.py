import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors
from hypothesis import given
from hypothesis import strategies as st

from autotune.weights.files import BadWeights, HubError, MissingWeights, PickledWeights
from autotune.weights.hub import fetch, select_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STEM = "diffusion_pytorch_model"
QWEN = [
    "README.md", "LICENSE", "assets/picture.png", "model_index.json",
    "scheduler/scheduler_config.json",
    "tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer/chat_template.jinja",
    "text_encoder/config.json",
    "text_encoder/generation_config.json",
    "text_encoder/model-00001-of-00002.safetensors",
    "text_encoder/model-00002-of-00002.safetensors",
    "text_encoder/model.safetensors.index.json", "transformer/config.json",
    f"transformer/{STEM}.safetensors",
    f"transformer/{STEM}.fp16.safetensors", f"transformer/{STEM}.bin", "transformer/flux.ckpt",
    f"vae/{STEM}.safetensors", "vae/config.json", "vae/extra.gguf", "all-in-one.safetensors",
]  # fmt: skip


def test_only_the_files_of_the_components_are_chosen():
    assert set(select_files(QWEN, ["transformer", "tokenizer", "scheduler"])) == {
        "model_index.json", "transformer/config.json", f"transformer/{STEM}.safetensors",
        "tokenizer/vocab.json",
        "tokenizer/merges.txt", "tokenizer/chat_template.jinja", "scheduler/scheduler_config.json",
    }  # fmt: skip


def test_shards_come_with_their_index_and_without_a_second_precision():
    variant = [
        name.replace(".safetensors", ".fp16.safetensors")
        for name in QWEN
        if "text_encoder/model-" in name
    ]
    chosen = select_files(
        [*QWEN, *variant, "text_encoder/model.safetensors.index.fp16.json"], ["text_encoder"]
    )
    assert {name for name in chosen if "safetensors" in name} == {
        "text_encoder/model-00001-of-00002.safetensors",
        "text_encoder/model-00002-of-00002.safetensors",
        "text_encoder/model.safetensors.index.json",
    }  # fmt: skip


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
def test_whatever_is_missing_the_choice_is_from_the_files_and_never_a_pickle(files, components):
    try:
        chosen = select_files(files, components)
    except BadWeights:
        return
    assert set(chosen) <= set(files)
    assert not [name for name in chosen if name.endswith((".bin", ".ckpt", ".png"))]


@pytest.fixture
def cached(tmp_path):
    """A pipeline as the cache keeps it: a folder named by its commit."""
    folder = tmp_path / "snapshots" / COMMIT
    (folder / "vae").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    (folder / "model_index.json").write_text("{}")
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    (folder / "vae" / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "vae" / f"{STEM}.safetensors.index.json").write_text(json.dumps(index))
    (folder / "vae" / "model-1.safetensors").touch()
    (folder / "vae" / "model-2.safetensors").touch()
    return folder


def answer(monkeypatch, result):
    def model_info(self, repo, revision=None):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def test_fetching_asks_for_the_chosen_files_at_the_commit(monkeypatch, cached):
    asked = {}

    def download(repo, *, dry_run=False, **options):
        asked.update(repo=repo, **options)
        return [] if dry_run else str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", lambda self, repo: None)
    answer(
        monkeypatch,
        SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in QWEN]),
    )
    fetched = fetch("Qwen/Qwen-Image", components=["vae"])
    assert (fetched.name, fetched) == (COMMIT, cached)
    assert (
        asked["revision"] == "main"
    )  # so that the cache knows the branch offline; the folder names the commit
    assert set(asked["allow_patterns"]) == {
        "model_index.json",
        "vae/config.json",
        f"vae/{STEM}.safetensors",
    }


def http_error(kind):
    return kind("no", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (http_error(errors.RepositoryNotFoundError), "owner/name"),
        (http_error(errors.GatedRepoError), "license"),
        (http_error(errors.RevisionNotFoundError), "branch"),
        (http_error(errors.HfHubHTTPError), "later"),
        (errors.HFValidationError("bad"), "owner/name"),
    ],
)
def test_each_refusal_of_the_hub_has_its_own_hint(monkeypatch, error, word):
    answer(monkeypatch, error)
    with pytest.raises(HubError) as caught:
        fetch("some/repo", components=["vae"])
    assert word in caught.value.hint


OFFLINE = [
    errors.OfflineModeIsEnabled("offline"),
    ConnectionError("no route"),
    errors.HfHubHTTPError.__bases__[0]("no route"),
]


def keep(monkeypatch, cached):
    def find(repo, filename, revision):
        return str(cached / filename) if (cached / filename).is_file() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", find)


@pytest.fixture(params=OFFLINE, ids=lambda error: type(error).__name__)
def offline(request, monkeypatch, cached):
    answer(monkeypatch, request.param)
    keep(monkeypatch, cached)


def test_offline_a_complete_cache_is_used_and_its_commit_known(offline, cached):
    assert fetch("some/repo", components=["vae", "tokenizer"]).name == COMMIT


@pytest.mark.parametrize(
    "lost",
    [
        "vae/model-2.safetensors",
        "vae/config.json",
        "model_index.json",
        f"vae/{STEM}.safetensors.index.json",
    ],
)
def test_offline_the_missing_file_is_named(offline, cached, lost):
    (cached / lost).unlink()
    with pytest.raises(MissingWeights) as caught:
        fetch("some/repo", components=["vae"])
    assert ("vae/*.safetensors" if "safetensors.index" in lost else lost) in caught.value.message


def test_a_hub_that_refuses_connections_counts_as_offline(monkeypatch, cached):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    keep(monkeypatch, cached)
    assert fetch("some/repo", components=["vae"]).name == COMMIT
