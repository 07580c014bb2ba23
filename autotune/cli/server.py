"""The server of `autotune ui`: who may ask, which files there are, and which function answers.

It listens to this machine alone, unless told otherwise with a token. A secret address opens it: its
token becomes a cookie that no other site's request carries.
"""

import errno
import hmac
import os
import secrets
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import anyio
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from autotune.cli.jobs import Jobs
from autotune.errors import InvalidInput, explain_error
from autotune.report.page import make_templates
from autotune.system.files import atomic_write

MAX_FIELDS = 1000
MAX_FORM_BYTES = 1 << 20
MAX_UPLOAD_BYTES = 64 << 20
WATCH_SECONDS = 1.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # without any, browsers would send forms from origin `null`
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
SAFE_METHODS = ("GET", "HEAD")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY = ("0.0.0.0", "::")


class Guard:
    """Refuses what does not come from the page itself: by host, origin, and the secret cookie."""

    def __init__(self, app: Any, origins: Iterable[str], token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token, cookie
        self.origins = frozenset(origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        answer: Any = PlainTextResponse("only HTTP is spoken here\n", 403)
        if scope["type"] == "http":
            answer = self._judge(Request(scope)) or self.app

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                message["headers"] += [
                    (name.encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.encode() not in own
                ]
            await send(message)

        await answer(scope, receive, send_guarded)

    def _judge(self, request: Request) -> Response | None:
        origin = f"http://{request.headers.get('host', '')}"
        if origin not in self.origins:
            return PlainTextResponse("the address names another host than this server\n", 421)
        is_safe = request.method in SAFE_METHODS
        sent = request.headers.get("origin", origin if is_safe else "")
        site = request.headers.get("sec-fetch-site", "none")
        if sent != origin or (not is_safe and site not in ("same-origin", "none")):
            return PlainTextResponse("the request comes from another site\n", 403)
        given = request.query_params.get("token")
        if given is not None and is_safe and _is_same(given, self.token):
            query = urlencode([one for one in parse_qsl(request.url.query) if one[0] != "token"])
            opened = RedirectResponse(request.url.path + f"?{query}" * bool(query), 303)
            opened.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return opened
        if not _is_same(request.cookies.get(self.cookie, ""), self.token):
            why = "open the address that `autotune ui` printed: it lets you in\n"
            return PlainTextResponse(why, 403)
        return None


def _is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


class Asked(dict[str, list[str]]):
    """The values of a form or an address, by name."""

    @classmethod
    def of(cls, text: str) -> "Asked":
        asked = cls()
        if text.count("&") >= MAX_FIELDS:
            raise InvalidInput(f"over {MAX_FIELDS} fields were sent", hint="send less at once")
        # The name of a file may be of any bytes.
        for name, value in parse_qsl(text, keep_blank_values=True, errors="surrogateescape"):
            asked.setdefault(name, []).append(value.replace("\x00", ""))
        return asked

    def one(self, name: str, default: str = "") -> str:
        return self.get(name, [default])[0].strip()

    def many(self, name: str) -> list[str]:
        return [value.strip() for value in self.get(name, []) if value.strip()]

    def number(self, name: str, default: int, limit: int = 10**6) -> int:
        text = self.one(name)
        return min(int(text[:9]), limit) if text.isascii() and text.isdigit() else default


@dataclass(frozen=True)
class Site:
    """The folders that the page may read and write; the first is where its commands run."""

    roots: tuple[Path, ...]

    @property
    def workspace(self) -> Path:
        return self.roots[0]

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.workspace)

    @cached_property
    def templates(self) -> Any:
        return make_templates()

    def inside(self, name: str | Path) -> Path:
        """Return the real path of what is asked for. Raises InvalidInput if it lies outside of the
        folders, by `..` or by links."""
        try:
            path = Path(os.path.realpath(self.workspace / name))
        except (ValueError, OSError) as error:
            raise InvalidInput("this is no path", hint="name a file or a folder") from error
        if not self.has(path) or str(name).startswith("~"):  # which commands follow home
            hint = "name its folder when you start the page: autotune ui FOLDER..."
            raise InvalidInput(f"{name} lies or leads outside the page's folders", hint=hint)
        return path

    def has(self, path: Path) -> bool:
        """Tell if a path really lies in the folders."""
        return any(Path(os.path.realpath(path)).is_relative_to(root) for root in self.roots)

    def shown(self, path: Path) -> str:
        """Return the path as a command in the workspace names it."""
        here = path.is_relative_to(self.workspace)
        return str(path.relative_to(self.workspace)) if here else str(path)

    def render(self, template: str, code: int = 200, **values: Any) -> Response:
        """Answer with a page."""
        text = self.templates.get_template(template).render(site=self, **values)
        return Response(text.encode("utf-8", "replace"), code, media_type="text/html")


Handler = Callable[[Site, Asked], Any]
ROUTES: list[tuple[str, str, Handler]] = []


def route(path: str, method: str = "GET") -> Callable[[Handler], Handler]:
    """Make a function answer requests; what it raises is shown as what happened and what to do.

    It returns a response; for PUT the file to write, and for WATCH files and whether all is over.
    """

    def add(handler: Handler) -> Handler:
        ROUTES.append((path, method, handler))
        return handler

    return add


async def read_body(request: Request, limit: int) -> bytes:
    """Read what is sent. Raises InvalidInput as soon as it is more than `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise InvalidInput(f"over {limit >> 20} MiB were sent", hint="send less at once")
        parts.append(part)
    return b"".join(parts)


def build_app(site: Site, origins: Iterable[str], token: str, cookie: str = "autotune") -> Any:
    """Build the application of all routes: every request passes the guard first."""

    def endpoint(method: str, handler: Handler) -> Any:
        async def answer(request: Request) -> Response:
            try:
                asked = Asked.of(request.url.query)
                if method == "POST":
                    body = await read_body(request, MAX_FORM_BYTES)
                    asked = Asked.of(body.decode("utf-8", "replace"))
                asked.update({name: [value] for name, value in request.path_params.items()})
                found: Any = await run_in_threadpool(handler, site, asked)
                if method == "PUT":
                    body = await read_body(request, MAX_UPLOAD_BYTES)
                    await run_in_threadpool(_write_new, found, body)
                    return Response(status_code=204)
                if method == "WATCH":
                    return StreamingResponse(_watch(*found), media_type="text/event-stream")
                made: Response = found
                return made
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                if os.environ.get("AUTOTUNE_TRACEBACK"):
                    traceback.print_exception(error)
                is_part = "hx-request" in request.headers or request.method == "PUT"
                template = "error_part.html" if is_part else "error.html"
                return site.render(template, 400, error=explain_error(error), page="")

        return answer

    routes = [
        Route(path, endpoint(method, handler), methods=["GET" if method == "WATCH" else method])
        for path, method, handler in ROUTES
    ]
    return Guard(Starlette(routes=routes), origins, token, cookie)


def _write_new(target: Path, body: bytes) -> None:
    with atomic_write(target) as part:
        part.write_bytes(body)
        if os.path.lexists(target):  # another upload came first
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


async def _watch(files: list[Path], is_over: Callable[[], bool]) -> AsyncIterator[str]:
    """Tell when a file changes, until the work is over."""
    seen: object = None
    while True:
        now = await run_in_threadpool(lambda: [_version(file) for file in files])
        is_last = await run_in_threadpool(is_over)
        if seen is not None and (now != seen or is_last):
            yield "data: changed\n\n"
        if is_last:
            yield "event: over\ndata: over\n\n"
            return
        seen = now
        yield ":\n\n"  # fails if nobody listens any more
        await anyio.sleep(WATCH_SECONDS)


def _version(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def serve(folders: list[Path], host: str, token: str | None, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `tell` gets the address to open, and what is exposed.

    Raises InvalidInput if a folder does not exist, the port is taken, or other machines could come
    in without a token of yours.
    """
    hint = "choose another address: --host 127.0.0.1:PORT"
    try:
        split = urlsplit(f"//{host}")
        name, port = split.hostname or LOOPBACK[0], split.port or 0
    except ValueError as error:
        raise InvalidInput(f"{host} is no address: {error}", hint=hint) from error
    is_open = name not in LOOPBACK
    if is_open and (token is None or len(token) < 16):
        hint = "choose a secret of 16 characters or more: --token SECRET, or AUTOTUNE_TOKEN"
        raise InvalidInput(f"at {name} anyone who reaches this machine could come in", hint=hint)
    for folder in folders:
        if not folder.is_dir():
            raise InvalidInput(f"there is no folder {folder}", hint="name a folder that exists")
    site = Site(tuple(Path(os.path.realpath(folder)) for folder in folders))
    os.chdir(site.workspace)  # names mean here what they mean to its commands
    token = token or secrets.token_urlsafe(32)
    try:
        info = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(info[4][:2], family=info[0])
    except OSError as error:
        raise InvalidInput(f"cannot listen at {host}: {error.strerror}", hint=hint) from error
    port = listening.getsockname()[1]
    addresses = [one for own in psutil.net_if_addrs().values() for one in own]
    outer = [one.address for one in addresses if one.family == info[0] and is_open]
    names = [*LOOPBACK, *([name, socket.gethostname(), *outer] if is_open else [])]
    written = [f"[{one}]" if ":" in one else one for one in names]
    origins = [f"http://{one}:{port}" for one in written]
    app = build_app(site, origins, token, f"autotune-{port}")
    if is_open:
        tell(
            "warning: other machines can reach this page, unencrypted: anyone with the token sees "
            f"and changes what is in {', '.join(map(str, site.roots))}, and starts runs"
        )
    ways = [one for one in outer if one not in LOOPBACK] if name in ANY else []
    shown = (ways or [name])[0]
    tell(f"open http://{f'[{shown}]' if ':' in shown else shown}:{port}/?token={quote(token)}")
    settings = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(settings).run(sockets=[listening])
