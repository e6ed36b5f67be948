"""A Redis to test with: `redis-server` where it is installed, else one in this process with its protocol."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from fakeredis import TcpFakeServer

from benchmarks.private_ray import free_port
from tests.support.unpacked_program import libraries_of

PATIENCE_S = 60.0


@contextmanager
def redis_server() -> Iterator[str]:
    """Yield its URL."""
    program = shutil.which("redis-server")
    with _imitation() if program is None else _real(program) as url:
        yield url


@contextmanager
def _real(program: str) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder]
        environment = {**os.environ, **libraries_of(program)}
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, env=environment)
        try:
            url = f"redis://127.0.0.1:{port}/0"
            _wait_until_up(url)
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait_until_up(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


class _PromptServer(TcpFakeServer):
    """Sends each part of an answer at once, as Redis does, not when the part before it is acknowledged."""

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, address


@contextmanager
def _imitation() -> Iterator[str]:
    server = _PromptServer(("127.0.0.1", 0), server_type="redis")
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
