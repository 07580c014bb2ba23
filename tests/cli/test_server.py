"""The page's server: who may ask, which files it reaches, and that what it shows is text."""

import json
import os
import re
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from autotune.errors import InvalidInput
from autotune.plan.file import save_plan

pytest.importorskip("starlette", reason="starlette is not installed: pip install '.[dev]'")
from starlette.testclient import TestClient

from autotune.cli import app, pages  # noqa: F401 - they add commands and routes
from autotune.cli.forms import build_words, values_of
from autotune.cli.jobs import Jobs, is_locked
from autotune.cli.server import ROUTES, Asked, Site, build_app, serve
from autotune.demo.lesson import SMALL_WORLD
from tests.report.page.pages import golden_plan
from tests.report.page.test_page import Outline

HOME, TOKEN = "http://127.0.0.1:8000", "a-secret-of-this-test"
HOSTILE = "<script>window.hacked=1</script></textarea>\"'><img src=x onerror=alert(1)>\x1b[31m"
READ = ["/data", "/plan", "/train", "/results", "/machine", "/compare", "/import", "/records"]


@pytest.fixture
def site(tmp_path):
    root = tmp_path / "work"
    (root / "photos").mkdir(parents=True)
    for name, caption in (("a", "a cat"), ("b", "two cats")):
        Image.new("RGB", (80, 80), "teal").save(root / "photos" / f"{name}.png")
        (root / "photos" / f"{name}.txt").write_text(caption + "\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("hidden words")
    Image.new("RGB", (80, 80)).save(tmp_path / "outside" / "secret.png")
    return Site((root,))


@pytest.fixture
def stranger(site):
    return TestClient(build_app(site, [HOME], TOKEN), base_url=HOME, follow_redirects=False)


@pytest.fixture
def user(stranger):
    stranger.get(f"/?token={TOKEN}")
    stranger.headers["origin"] = HOME
    return stranger


def test_the_address_becomes_a_strict_cookie(stranger):
    assert stranger.get("/data").status_code == 403
    assert stranger.get("/?token=guessed").status_code == 403
    opened = stranger.get(f"/data?folder=photos&token={TOKEN}")
    assert (opened.status_code, opened.headers["location"]) == (303, "/data?folder=photos")
    cookie = opened.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert stranger.get("/data").status_code == 200
    assert TOKEN not in stranger.get("/data").text


@pytest.mark.parametrize("path", [*READ, "/static/page.css", "/stream", "/upload", "/nowhere"])
def test_nothing_is_shown_without_the_cookie(stranger, path):
    assert stranger.get(path).status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1", "", "127.0.0.2"]
)
def test_other_host_names_are_refused(user, host):
    """A site whose name points here (DNS rebinding) would be of the same origin."""
    assert user.get("/data", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1:9000"},
        {"origin": HOME, "sec-fetch-site": "cross-site"},
        {"origin": HOME, "sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_change_nothing(user, site, headers):
    asked = {"folder": "photos", "name": "a.png", "caption": "changed"}
    assert user.post("/data/caption", data=asked, headers=headers).status_code == 403
    assert (site.workspace / "photos" / "a.txt").read_text() == "a cat\n"
    assert user.put("/upload?folder=photos&name=c.png", headers=headers).status_code == 403


def test_every_answer_carries_the_policy(user):
    for path in [*READ, "/static/app.js", "/nowhere", "/data/caption"]:
        headers = user.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "access-control-allow-origin" not in headers
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "PATCH", "TRACE"])
def test_other_methods_are_refused(user, method):
    assert user.request(method, "/data").status_code in (403, 405)


@pytest.mark.parametrize("name", ["../outside", "/etc", "photos/../../outside", "link"])
def test_no_path_leads_out(user, site, name):
    (site.workspace / "link").symlink_to("../outside")
    for path in ("/data", "/data/check", "/run", "/run/live", "/results", "/stream"):
        key = "run" if path == "/stream" else "folder"
        answer = user.get(path, params={key: name})
        assert answer.status_code == 400, path
        assert "hidden words" not in answer.text
    assert user.get("/thumb", params={"path": f"{name}/secret.png"}).status_code == 400
    assert user.get("/download", params={"path": f"{name}/x.safetensors"}).status_code == 400
    assert user.put("/upload", params={"folder": name, "name": "c.png"}).status_code == 400


def test_links_in_data_lead_nowhere(user, site, tmp_path):
    folder = site.workspace / "photos"
    Image.new("RGB", (80, 80)).save(folder / "c.png")
    (folder / "c.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (folder / "d.png").symlink_to(tmp_path / "outside" / "secret.png")
    assert "hidden words" not in user.get("/data?folder=photos").text
    assert user.get("/thumb?path=photos/d.png").status_code == 400
    asked = {"folder": "photos", "name": "c.png", "caption": "overwritten"}
    user.post("/data/caption", data=asked)
    assert (tmp_path / "outside" / "secret.txt").read_text() == "hidden words"
    job = site.jobs.draft(["probe"])
    for name in ("process", "exit"):
        (job.folder / name).write_text("0")
    (job.folder / "answer.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    assert "hidden words" not in user.get(f"/jobs/{job.name}").text


def test_only_pictures_and_adapters_are_served(user, site):
    (site.workspace / "page.html").write_text("<script>1</script>")
    assert user.get("/download?path=page.html").status_code == 400
    assert user.get("/thumb?path=page.html").status_code == 400
    os.rename(site.workspace / "photos/a.png", site.workspace / os.fsdecode(b"photos/\xff.png"))
    assert "/thumb?path=" in user.get("/data?folder=photos").text
    thumb = user.get("/thumb?path=photos/%ff.png&side=0")
    assert thumb.headers["content-type"] == "image/png"
    (site.workspace / "photos" / "broken.png").write_bytes(b"<script>1</script>")
    shown = user.get("/thumb?path=photos/broken.png")
    assert shown.status_code == 200, "no error in the console"
    assert "cannot be read" in shown.text
    assert "script" not in shown.text
    Image.new("RGB", (5000, 4000)).save(site.workspace / "photos" / "camera.jpg")
    assert user.get("/thumb?path=photos/camera.jpg").status_code == 200
    (site.workspace / "run").mkdir()
    shutil.copy(next(SMALL_WORLD.rglob("*.safetensors")), site.workspace / "run/base.safetensors")
    assert user.get("/download?path=run/base.safetensors").status_code == 400
    save_file({"x.lora_A.weight": torch.ones(1)}, site.workspace / "run/x.safetensors")
    sent = user.get("/download?path=run/x.safetensors")
    assert sent.headers["content-disposition"].startswith("attachment")


def test_uploads_are_limited(user, site, monkeypatch):
    monkeypatch.setattr("autotune.cli.server.MAX_UPLOAD_BYTES", 1000)
    monkeypatch.setattr("autotune.cli.server.MAX_FORM_BYTES", 1000)
    monkeypatch.setattr("autotune.cli.server.MAX_FIELDS", 400)

    def upload(name, size=10):
        params = {"folder": "photos", "name": name}
        return int(user.put("/upload", params=params, content=b"x" * size).status_code)

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", None)  # fails
        assert upload("c.txt") == 400
    assert upload("c.txt") == 204, "nothing is left of an upload that failed"
    assert upload("c.txt") == 400, "nothing is replaced"
    assert "none.yaml" not in user.get("/import").text
    assert upload("none.yaml") == 204
    assert "none.yaml" in user.get("/import").text, "what was uploaded is seen at once"
    assert upload("large.png", 1001) == 400
    assert [upload(name) for name in ("x.py", ".hidden.png", "x.sh", "x", "x.safetensors")] == [
        400
    ] * 5
    assert upload("../../up.png") == 204, "it lands in the folder, whatever its name says"
    assert (site.workspace / "photos" / "up.png").is_file()
    assert "less at once" in user.post("/data/replace", content=b"a&" * 499 + b"b").text
    assert user.post("/data/replace", content=b"find=" + b"x" * 1000).status_code == 400
    assert not (site.workspace / "photos" / "large.png").exists()


def test_hostile_words_are_shown_as_text(user, site):
    photos = site.workspace / "photos"
    (photos / "a.txt").write_text(HOSTILE.replace("\x1b", ""))
    name = "<img src=x onerror=alert(1)>.png"
    Image.new("RGB", (80, 80), "red").save(photos / name)
    (site.workspace / "<script>alert(1)<").mkdir()
    shutil.copy(photos / "b.png", site.workspace / "<script>alert(1)<" / "b.png")
    jobs = site.jobs
    words = ["--model", HOSTILE, "--data", "javascript:alert(1)", "--trigger", HOSTILE]
    job = jobs.draft(["plan", *words])
    (job.folder / "process").write_text("0")
    (job.folder / "exit").write_text("1")
    notice = {"event": "Notice", "text": HOSTILE, "level": "warning"}
    (job.folder / "events.jsonl").write_text(f"{json.dumps(notice)}\nerror: {HOSTILE}\n")
    (job.folder / "answer.txt").write_text(HOSTILE)
    pages = ["/data", "/data?folder=photos", "/plan", f"/jobs/{job.name}", f"/jobs/{job.name}/live"]
    pages += [
        "/import",
        f"/data?told={quote(HOSTILE)}",
        f"/data?folder={quote(HOSTILE)}",
        "/data/check?folder=photos",
    ]
    for path in pages:
        text = user.get(path).text
        found = Outline(text).tags
        scripts = [attrs for tag, attrs in found if tag == "script"]
        assert all(attrs.get("src", "").startswith("/static/") for attrs in scripts)
        assert not [name for _, attrs in found for name in attrs if name.startswith("on")], path
        assert not [attrs for tag, attrs in found if tag == "img" and attrs["src"] == "x"], path
        links = [attrs.get("href") or attrs.get("action") or "/" for _, attrs in found]
        assert all(link.startswith(("/", "data:,", "#")) for link in links), path
        assert "\x1b" not in text, path
    assert "&lt;script&gt;window.hacked=1" in user.get("/data?folder=photos").text


def test_forms_become_the_shown_command(user, site):
    asked = {"command": "plan", "model": "flux1-dev", "hardware": "nvidia-rtx-4090"}
    asked |= {"num_steps": "-5", "storage": "postgresql://x", "path": "p.yaml"}
    asked |= {"preview_prompts": "a cat; rm -rf /\na dog"}
    words = build_words(site, "plan", Asked({name: [value] for name, value in asked.items()}))
    assert words.count("--preview-prompt") == 2
    assert "--steps=-5" in words
    assert "--storage" not in words, "the page has no such field"
    assert values_of(words)["preview_prompts"] == ("a cat; rm -rf /", "a dog")
    shown = re.sub("<.*?>", "", user.get("/command", params=asked).text)
    assert "&#39;a cat; rm -rf /&#39;" in shown, "and it is quoted for a shell"


def test_known_models_are_answered_at_once(user):
    def told(model, hardware):
        return user.get("/plan/known", params={"model": model, "hardware": hardware}).text

    assert "sdxl should fit" in told("sdxl", "nvidia-rtx-4090")
    assert "flux1-dev should fit" in told("FLUX.1-dev", "4090")
    assert "wan-2.2 does not fit" in told("wan-2.2", "nvidia-rtx-3060")
    assert not told("<b>mine", "4090") + told("sdxl", "") + told("sdxl", "<b>card")


CONFIGS = Path(__file__).parents[1] / "interop" / "configs"
REFUSED = yaml.safe_load((Path(__file__).parent / "server.yaml").read_text())


@pytest.mark.parametrize("asked", REFUSED)
def test_commands_stay_in_the_folders(user, site, asked):
    theirs = golden_plan()
    job = theirs.job.changed(data=str(site.workspace.parent / "outside"))
    (site.workspace / "run").mkdir()
    for file in ("plan.yaml", "run/run-plan.yaml"):
        save_plan(theirs.changed(job=job), site.workspace / file)
    (site.workspace / "list.yaml").write_text("folders: [{path: ../outside}]")
    (site.workspace / "linked").mkdir()
    (site.workspace / "linked" / "a.png").symlink_to("../../outside/secret.png")
    outside = site.workspace.parent / "outside"
    shutil.copy(CONFIGS / "sd_scripts_data.toml", outside / "data.toml")
    for name, old, new in (
        ("ai_toolkit.yaml", "photos", outside),
        ("sd_scripts.toml", "sd_scripts_data.toml", outside / "data.toml"),
    ):
        text = (CONFIGS / name).read_text().replace(old, str(new))
        (site.workspace / name).write_text(text)
    assert user.post("/jobs", data=asked).status_code == 400
    assert list(site.jobs) == []


def test_open_and_odd_addresses_are_refused(tmp_path):
    opened = [("0.0.0.0:0", token, "could come in") for token in (None, "short")]
    odd = [(host, TOKEN, "is no address") for host in ("127.0.0.1:99999", "127.0.0.1:x", "[")]
    for host, token, why in opened + odd:
        with pytest.raises(InvalidInput, match=why):
            serve([tmp_path], host, token, print)


def test_odd_jobs_and_numbers_are_harmless(user, site):
    site.jobs.draft(["plan"])
    (job,) = site.jobs
    (job.folder / "command.json").write_text("[" * 5000)
    assert job.words == ["?"]
    asked = f"folder=photos&resolution={'1' * 5000}"
    assert "bug in autotune" not in user.get(f"/data/check?{asked}").text
    assert "608×608" in user.get("/data/check?folder=photos&resolution=512x768").text


def test_only_plans_are_shown(user, site):
    save_plan(golden_plan(), site.workspace / "plan.yaml")
    assert "Train this plan" in user.get("/plan?file=plan.yaml").text
    (site.workspace / "bad.yaml").write_text("frozen: !!python/object/apply:os.system [id]\n")
    assert user.get("/plan?file=bad.yaml").status_code == 400


def wait_for(job, *states):
    started = time.monotonic()
    while job.state not in states:
        assert time.monotonic() - started < 60, (job.state, job.told())
        time.sleep(0.1)


def test_jobs_outlive_their_server(tmp_path):
    jobs = Jobs(tmp_path)
    first = jobs.start(["probe", "--list"], is_queued=True)
    assert is_locked(first.folder / "lock")
    second = jobs.start(["probe", "--list", "--json"], is_queued=True)
    found = Jobs(tmp_path)  # as after a restart
    assert [job.name for job in found] == [second.name, first.name]
    wait_for(first, "finished")
    wait_for(second, "finished")
    assert "4090" in first.answer()
    bad = jobs.start(["explain", "absent.yaml"])
    wait_for(bad, "failed")
    assert any(line.startswith("hint: ") for line in bad.told()[1])
    assert {path for path, way, _ in ROUTES if way == "POST"} >= {"/jobs/{name}/stop"}


def test_waiting_jobs_stop_at_once(tmp_path):
    import fcntl

    jobs = Jobs(tmp_path)
    (tmp_path / ".autotune").mkdir()
    with (tmp_path / ".autotune" / "queue").open("w") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        job = jobs.start(["train", "--output", "runs/run"], is_queued=True)
        time.sleep(1.0)
        assert job.state == "waiting"
        assert "runs/run-2" in build_words(Site((tmp_path,)), "train", Asked()), (
            "the first is taken"
        )
        job.stop()
        wait_for(job, "stopped")
    (job.folder / "exit").write_text("-2")
    assert job.state == "stopped", "while it still imported"
    (job.folder / "exit").unlink()
    assert job.state == "lost"
