"""`--push-to-hub` against a hub of our own: what leaves the machine, what is refused early."""

import base64
import json
import shutil
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

import autotune
from autotune.errors import InvalidInput
from autotune.plan.file import load_plan, save_plan, seal, with_job
from autotune.report.files import push_to_hub
from autotune.train.folder import comparison_file
from tests.api.test_report import run_folder
from tests.report.page.pages import FOLDER

PROMPT = 'a "red" heart: on a ground'


class Hub:
    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.made: dict[str, Any] = {}


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            return

        def do_GET(self):
            is_known = self.path == "/api/whoami-v2"
            self.reply(200 if is_known else 404, {"name": "me", "type": "user"} if is_known else {})

        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/api/repos/create":
                hub.made = json.loads(content)
                self.reply(200, {"url": "https://huggingface.co/me/heart"})
            elif self.path == "/api/validate-yaml":
                self.reply(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                more = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                told = [{"path": file["path"], **more} for file in json.loads(content)["files"]]
                self.reply(200, {"files": told})
            else:
                for line in map(json.loads, content.splitlines()):
                    if line["key"] == "file":
                        value = line["value"]
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                url = "https://huggingface.co/me/heart/commit/1"
                self.reply(200, {"commitUrl": url, "commitOid": "1" * 40})

        def reply(self, status, content):
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
def run(tmp_path):
    measured = autotune.load_plan(Path(FOLDER) / "measured.yaml")
    plan = with_job(measured, preview_prompts=(PROMPT,), data="/home/me/secret-photos")
    folder = run_folder(tmp_path / "run", plan)
    content = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    adapter = struct.pack("<Q", len(content)) + content + bytes(4)
    (folder / "pytorch_lora_weights.safetensors").write_bytes(adapter)
    return folder


def test_push_uploads_adapter_samples_card_only(hub, run):
    told_first = []
    assert push_to_hub(run, "me/heart", told_first.append).endswith("/me/heart")
    assert hub.made["visibility"] == "private"
    names = {"README.md", "pytorch_lora_weights.safetensors", "sample_with_adapter.png"}
    assert set(hub.files) == names
    assert all(name in told_first[0] for name in names)
    card = hub.files["README.md"].decode()
    _, header, text = card.split("---\n", 2)
    told = yaml.safe_load(header)
    assert (told["base_model"], told["license"]) == ("Qwen/Qwen-Image", "apache-2.0")
    assert told["widget"] == [{"text": PROMPT, "output": {"url": "sample_with_adapter.png"}}]
    assert 'load_lora_weights("me/heart", weight_name=\'pytorch_lora_weights.saf' in text
    assert "secret-photos" not in card


@pytest.mark.parametrize("name", ["pytorch_lora_weights.safetensors", "sample_with_adapter.png"])
@pytest.mark.parametrize("kind", ["link", "other content"])
def test_only_what_run_wrote_is_uploaded(hub, run, tmp_path, name, kind):
    (run / name).rename(tmp_path / name)
    if kind == "link":
        (run / name).symlink_to(tmp_path / name)
    else:
        (run / name).write_text("-----BEGIN PRIVATE KEY-----")
    with pytest.raises(InvalidInput, match="is not uploaded"):
        push_to_hub(run, "me/heart", lambda _: None)
    assert not hub.files


def test_no_linked_folder_is_uploaded(hub, run, tmp_path):
    plan, picture = load_plan(run / "run-plan.yaml"), run / comparison_file("with", 1)
    save_plan(with_job(plan, preview_prompts=(PROMPT, PROMPT)), run / "run-plan.yaml")
    shutil.rmtree(picture.parent, ignore_errors=True)
    (tmp_path / "photos").mkdir()
    picture.parent.symlink_to(tmp_path / "photos")
    shutil.copy(run / "sample_with_adapter.png", picture)
    with pytest.raises(InvalidInput, match="in a linked folder"):
        push_to_hub(run, "me/heart", lambda _: None)
    assert not hub.files


@pytest.mark.parametrize("part", ["a caption as prompt", "pictures of the data as controls"])
def test_no_preview_showing_data_is_uploaded(hub, run, part):
    plan = load_plan(run / "run-plan.yaml")
    work = plan.frozen.workload.changed(num_control_images=1)
    if part == "a caption as prompt":
        made = plan.changed(job=plan.job.changed(preview_prompts=None))
    else:
        made = seal(plan.job, plan.frozen.changed(workload=work))
    save_plan(made, run / "run-plan.yaml")
    push_to_hub(run, "me/heart", lambda _: None)
    assert set(hub.files) == {"README.md", "pytorch_lora_weights.safetensors"}
    assert b"widget" not in hub.files["README.md"]
