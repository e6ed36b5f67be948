"""A Hugging Face hub on this machine, with the models that a test puts on it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


class ModelHub:
    """Its models by id, each a directory. `asked` are the paths that were asked for."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.asked.append(self.path)
                status, headers, body = hub.answer(self.path)
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        for pattern in (_INFO, _TREE, _FILE):
            if (found := pattern.match(path)) is None:
                continue
            model, revision, *name = found.groups()
            directory = self.models.get(model)
            if directory is None:
                return 404, {"x-error-code": "RepoNotFound"}, b"{}"
            if revision not in ("main", COMMIT):
                return 404, {"x-error-code": "RevisionNotFound"}, b"{}"
            if name and model in self.gated:
                return 403, {"x-error-code": "GatedRepo"}, b"{}"
            if name:
                return self._file(directory / name[0])
            files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
            if pattern is _INFO:
                names = [{"rfilename": str(path.relative_to(directory))} for path in files]
                return 200, {}, json.dumps({"id": model, "sha": COMMIT, "siblings": names}).encode()
            tree = [
                {"type": "file", "path": str(path.relative_to(directory)), "size": path.stat().st_size, "oid": "0"}
                for path in files
            ]
            return 200, {"content-type": "application/json"}, json.dumps(tree).encode()
        return 404, {}, b"{}"

    def _file(self, path: Path) -> tuple[int, dict[str, str], bytes]:
        if not path.is_file():
            return 404, {"x-error-code": "EntryNotFound"}, b""
        body = path.read_bytes()
        return 200, {"x-repo-commit": COMMIT, "etag": f'"{hashlib.sha1(body).hexdigest()}"'}, body

    def close(self) -> None:
        """Be reached no more. Idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def model_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[ModelHub]:
    """A hub that this process asks, with an empty local cache."""
    from huggingface_hub import constants

    hub = ModelHub()
    files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    places = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": str(cache)}
    for name, value in {"HF_HUB_OFFLINE": False, **places}.items():  # they are read when it is imported
        monkeypatch.setattr(constants, name, value)
    try:
        yield hub
    finally:
        hub.close()
