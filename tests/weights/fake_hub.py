"""A hub of our own, as far as huggingface_hub asks; it can fail on purpose."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ABSENT = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}


class FakeHub:
    def __init__(self):
        self.repos: dict[str, Path] = {}
        self.break_once: set[str] = set()
        """Files whose first download ends half-way."""
        self.requests: list[tuple[str, str, str | None]] = []

    @property
    def downloads(self):
        return [
            path.split(f"/resolve/{COMMIT}/")[1]
            for verb, path, _ in self.requests
            if verb == "GET" and "/resolve/" in path
        ]


def describe_file(path, name):
    """An entry of the hub's listing: large files have a SHA-256, others git's SHA-1."""
    content = path.read_bytes()
    entry = {"type": "file", "path": name, "size": len(content)}
    if path.suffix == ".safetensors":
        sha = hashlib.sha256(content).hexdigest()
        lfs = {"oid": sha, "size": len(content), "pointerSize": 134}
        return {**entry, "oid": sha[:40], "lfs": lfs}
    return {**entry, "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}


@contextmanager
def fake_hub():
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def log_message(self, *arguments):
            return

        def answer(self):
            path = self.path.split("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
            if name not in hub.repos:
                self.reply(404, b"{}", ABSENT)
            elif path.startswith("/api/models/"):
                self.describe(name, path)
            else:
                self.send_file(hub.repos[name], path.split(f"/resolve/{COMMIT}/")[-1])

        def describe(self, name, path):
            revision = path.rsplit("/revision/", maxsplit=1)[-1] if "/revision/" in path else "main"
            if revision not in ("main", COMMIT):
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            found = sorted(path for path in hub.repos[name].rglob("*") if path.is_file())
            files = [file.relative_to(hub.repos[name]).as_posix() for file in found]
            if "/tree/" in path:
                tree = [describe_file(path, name) for path, name in zip(found, files, strict=True)]
                self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
                return
            info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

        def send_file(self, folder, file):
            if not (folder / file).is_file():
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content = (folder / file).read_bytes()
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            asked = self.headers.get("Range") or "bytes=0-"
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if self.command == "GET" and file in hub.break_once:
                hub.break_once.discard(file)
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True
                return
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.reply(206 if start else 200, content[start:], headers)

        def reply(self, status, content, headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hub_in_this_process(cache):
    """huggingface_hub, already imported, asks the fake hub and keeps files in `cache`."""
    from huggingface_hub import constants

    with fake_hub() as (hub, address), pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
