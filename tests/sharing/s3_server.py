"""A real S3 endpoint in this process, behind a proxy that can refuse or cut what is sent to it."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Faults:
    """What goes wrong with the next requests of a method: after `spare` good ones, `count` bad
    ones.
    """

    kind: str = "none"
    spare: int = 0
    count: int = 0
    method: str = "PUT"
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, kind: str, spare: int, count: int, method: str = "PUT") -> None:
        self.kind, self.spare, self.count, self.method, self.seen = kind, spare, count, method, 0

    def strikes(self, method: str) -> bool:
        if method != self.method or self.kind == "none":
            return False
        with self.lock:
            self.seen += 1
            return self.spare < self.seen <= self.spare + self.count


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up waiting is what some faults are for."""


def handler_for(port: int, faults: Faults) -> type[BaseHTTPRequestHandler]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if faults.strikes(self.command):
                return self.fail(body)
            upstream = http.client.HTTPConnection("127.0.0.1", port)
            upstream.request(self.command, self.path, body, dict(self.headers))
            self.answer(upstream.getresponse())
            return None

        def answer(self, response: http.client.HTTPResponse) -> None:
            body = response.read()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in (
                    "transfer-encoding",
                    "connection",
                    "content-length",
                    "date",
                    "server",
                ):
                    self.send_header(name, value)
            length = (
                response.getheader("content-length") if self.command == "HEAD" else str(len(body))
            )
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(body)

        def fail(self, body: bytes) -> None:
            self.close_connection = True
            if faults.kind.isdecimal():
                self.send_response(int(faults.kind))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            with socket.create_connection(
                ("127.0.0.1", port)
            ) as upstream:  # half of it arrives, then the line is cut
                head = [
                    f"PUT {self.path} HTTP/1.1",
                    *(f"{k}: {v}" for k, v in self.headers.items()),
                    "",
                    "",
                ]
                upstream.sendall("\r\n".join(head).encode() + body[: len(body) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Proxy


@contextmanager
def s3_server() -> Iterator[tuple[str, Faults]]:
    """Address of an empty S3 with a bucket called `team`, and its faults."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    faults = Faults()
    proxy = Quiet(("127.0.0.1", 0), handler_for(port, faults))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{proxy.server_address[1]}"
    try:
        boto3.client(
            "s3",
            endpoint_url=address,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        ).create_bucket(Bucket="team")
        yield address, faults
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()
