"""A metadata service over HTTP, with the paths and headers of AWS, Google Cloud and Azure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AWS = "/latest/meta-data/spot/instance-action"
PREEMPTED, MAINTENANCE = (f"/computeMetadata/v1/instance/{name}" for name in ("preempted", "maintenance-event"))
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2020-09-01&format=text"


class MetadataServer(ThreadingHTTPServer):
    """Answers with what `answers` has for a path, and with 404 otherwise."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, bytes | int] = {PREEMPTED: b"FALSE", MAINTENANCE: b"NONE", AZURE_NAME: b"vm-3"}
        """A body, or a status without one."""
        self.token = "token-1"
        """The only token of AWS that is valid; the service gives it to all that ask."""
        self.num_asked = 0
        self.is_slow = threading.Event()
        """Whether answers never end: a byte comes every 50 ms."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def clouds(self) -> dict[str, str]:
        """The address of each cloud's service, which is this one."""
        return dict.fromkeys(("aws", "gcp", "azure"), self.url)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing when a client hangs up."""


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_PUT(self) -> None:
        is_asked = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(self.server.token.encode() if is_asked else 400)

    def do_GET(self) -> None:
        self.server.num_asked += 1
        if self.path.startswith("/latest/") and self.headers["X-aws-ec2-metadata-token"] != self.server.token:
            return self._answer(401)
        if self.path.startswith("/computeMetadata/") and self.headers["Metadata-Flavor"] != "Google":
            return self._answer(403)
        if self.path.startswith("/metadata/") and self.headers["Metadata"] != "true":
            return self._answer(400)
        return self._answer(self.server.answers.get(self.path, 404))

    def _answer(self, answer: bytes | int) -> None:
        status, body = (200, answer) if isinstance(answer, bytes) else (answer, b"")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)
        while self.server.is_slow.is_set():
            self.wfile.write(b" ")
            threading.Event().wait(0.05)


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    """Run one in a thread."""
    server = MetadataServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_slow.clear()
        server.shutdown()
        server.server_close()
