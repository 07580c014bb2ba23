"""`publish` against a hub of our own, which keeps what it is sent: what leaves the machine, what
is refused early."""

import ast
import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

import autotune
from autotune.errors import AutotuneError, InvalidInput
from autotune.plan.plan_file import with_job, write_plan
from tests.api.test_report import run_folder
from tests.report.page.pages import FOLDER

PROMPT = 'a "red" heart: on a ground'


class Hub:
    """Repositories by name; `made` is how each was asked to be made."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.made: dict[str, Any] = {}
        self.tokens = {"right", "reader"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            return

        def token(self) -> str:
            return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

        def do_GET(self) -> None:
            known = {"/api/whoami-v2": {"name": "me", "type": "user"}}
            if self.token() not in hub.tokens:
                self.reply(401, {"error": "Invalid token"})
            else:
                self.reply(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.token() != "right":
                self.reply(403, {"error": "this token reads alone"})
            elif self.path == "/api/repos/create":
                hub.made = json.loads(content)
                self.reply(200, {"url": "https://huggingface.co/me/heart"})
            elif self.path == "/api/validate-yaml":
                self.reply(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                told = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False,
                "oid": None}
                        for f in json.loads(content)["files"]]  # fmt: skip
                self.reply(200, {"files": told})
            else:
                for line in map(json.loads, content.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(
                            line["value"]["content"]
                        )
                self.reply(
                    200,
                    {
                        "commitUrl": "https://huggingface.co/me/heart/commit/1",
                        "commitOid": "1" * 40,
                    },
                )

        def reply(self, status: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "right")
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    plan = with_job(
        autotune.load_plan(Path(FOLDER) / "measured.yaml"),
        preview_prompts=(PROMPT,),
        data="/home/me/secret-photos",
    )
    folder = run_folder(tmp_path / "run", plan)
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"an adapter")
    return folder


def test_the_adapter_its_samples_and_a_card_are_uploaded_and_nothing_else(
    hub: Hub, run: Path
) -> None:
    address = autotune.publish(run, "me/heart")
    assert address.endswith("/me/heart")
    assert hub.made["visibility"] == "private"
    assert set(hub.files) == {
        "README.md",
        "pytorch_lora_weights.safetensors",
        "sample_with_adapter.png",
    }
    assert hub.files["pytorch_lora_weights.safetensors"] == b"an adapter"
    card = hub.files["README.md"].decode()
    _, header, text = card.split("---\n", 2)
    told = yaml.safe_load(header)
    assert told["base_model"] == "Qwen/Qwen-Image"
    assert told["license"] == "apache-2.0"
    assert told["pipeline_tag"] == "text-to-image"
    assert told["widget"] == [{"text": PROMPT, "output": {"url": "sample_with_adapter.png"}}]
    assert 'load_lora_weights("me/heart", weight_name="pytorch_lora_weights.safetensors")' in text
    assert "secret-photos" not in card


def test_a_repository_is_public_only_if_asked(hub: Hub, run: Path) -> None:
    autotune.publish(run, "me/heart", private=False)
    assert hub.made["visibility"] == "public"


@pytest.mark.parametrize(
    ("token", "repo", "why"),
    [
        ("wrong", "me/heart", "does not let this token"),
        ("right", "no/such/name", "not a repository name"),
        ("right", "ownerless", "not a repository name"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_training(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str, repo: str, why: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(AutotuneError, match=why):
        autotune.require_hub(repo)


def test_without_a_token_the_hint_says_how_to_get_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(AutotuneError, match="no token") as error:
        autotune.require_hub("me/heart")
    assert "hf auth login" in (error.value.hint or "")


def test_a_token_that_only_reads_is_told_when_it_writes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "reader")
    with pytest.raises(AutotuneError, match="does not let this token write"):
        autotune.publish(run, "me/heart")
    assert not hub.files


def test_a_run_without_an_adapter_is_refused(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no finished run"):
        autotune.publish(run_folder(tmp_path / "run", finished=False), "me/heart")
    assert not hub.made


def test_texts_of_a_run_become_neither_markup_nor_code_of_its_card_and_no_path_leaves(
    hub: Hub, run: Path
) -> None:
    tracker, heading = (
        "![x](http://there/x.png)</div><script>",
        "two\n\n# lines\n``` www.there.org/_a_ me@there.org",
    )
    code = 'base") ; evil() #'
    plan = with_job(
        autotune.load_plan(run / "run-plan.yaml"), preview_prompts=(tracker, heading), base=code
    )
    write_plan(run / "run-plan.yaml", with_job(plan, revision="1" * 40))
    report = json.loads((run / "report.json").read_text())
    told = {
        "warnings": ["/home/me/secret-photos/anna.png was left out"],
        "adapter": "comfyui_lora_weights.safetensors",
    }
    (run / "report.json").write_text(json.dumps(report | told))
    (run / "previews").mkdir(exist_ok=True)
    for name in ("comfyui_lora_weights.safetensors", "previews/with-1.png"):
        (run / name).write_bytes(b"it")
    autotune.publish(run, "me/heart")
    assert "comfyui_lora_weights.safetensors" in hub.files
    text = hub.files["README.md"].decode().split("---\n", 2)[2]
    assert (
        'weight_name="pytorch_lora_weights.safetensors"' in text
    )  # not every pipeline reads ComfyUI's names
    assert "<script>" not in text
    assert "![x]" not in text
    for address in ("`http://there/x.png)`", "`www.there.org/_a_`", "`me@there.org`"):
        assert address in text, "renderers make links of what is not code, escaped or not"
    assert "secret-photos" not in text
    assert text.count("```") == 4
    assert "\n# lines" not in text
    (called,) = re.findall(r"from_pretrained\((.*)\)$", text, re.MULTILINE)
    assert ast.literal_eval(called) == code


def test_a_report_that_names_a_file_elsewhere_uploads_nothing(hub: Hub, run: Path) -> None:
    (run.parent / "secret").write_text("mine")
    report = json.loads((run / "report.json").read_text())
    (run / "report.json").write_text(json.dumps({**report, "adapter": "../secret"}))
    with pytest.raises(InvalidInput, match="no finished run"):
        autotune.publish(run, "me/heart")
    assert not hub.files
