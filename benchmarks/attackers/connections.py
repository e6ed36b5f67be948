"""Connections as no proper client has them: half a request, one that never reads, one that never ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from benchmarks.private_ray import HOST
from benchmarks.siege_answers import Answer
from benchmarks.siege_app import authorization

PATIENCE_S = 120.0
"""Longest time in which a server must have ended a connection that it should not keep."""
ANSWER_S = 600.0
"""Longest time in which it must have begun to answer a request that waits behind others."""


class Stranger:
    """One TCP connection to a port of the application."""

    def __init__(self, host: str, port: int, *, is_patient: bool = True) -> None:
        """A patient one waits while nobody listens: what it attacks has been killed, and will be replaced."""
        self._address = host, port
        self._is_patient = is_patient

    async def __aenter__(self) -> Stranger:
        """Connect. Raises OSError, of which TimeoutError is one kind."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self._connect():
                await asyncio.sleep(0.2)
        return self

    async def _connect(self) -> bool:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        except BaseException as error:
            self._socket.close()
            if self._is_patient and isinstance(error, ConnectionRefusedError):
                return False
            raise
        return True

    async def __aexit__(self, *exc: object) -> None:
        self._socket.close()

    def shrink(self) -> None:
        """Let the kernel take in as little as possible of what is not read."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)

    async def send(self, data: bytes) -> bool:
        """Send; return whether the server still takes it. One that reads no more for long is as good as gone."""
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self._socket, data), PATIENCE_S)
        except (OSError, TimeoutError):
            return False
        return True

    async def read(self, size: int = 65536) -> bytes:
        """Read some; b"" when the server has ended the connection. Raises TimeoutError."""
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, size), PATIENCE_S)
        except OSError:
            return b""

    async def read_all(self, most: int = 2**20) -> bytes:
        """Read until the server ends the connection, or `most` bytes. Raises TimeoutError."""
        data = b""
        while len(data) < most and (more := await self.read()):
            data += more
        return data

    async def until_given_up(self, pids: Iterable[int]) -> bool:
        """Wait, without reading, until none of these processes holds the other end any more. Its time begins with
        the answer, for which a request may have to wait.
        """
        loop, port = asyncio.get_running_loop(), self._socket.getsockname()[1]
        deadline = loop.time() + ANSWER_S
        is_answered = False
        while await asyncio.to_thread(_is_held, list(pids), port):
            if not is_answered and self._has_unread():
                is_answered, deadline = True, loop.time() + PATIENCE_S
            if loop.time() > deadline:
                return False
            await asyncio.sleep(1.0)
        return True

    def _has_unread(self) -> bool:
        """Whether anything has come, which stays unread, or the end of the connection."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def head(path: str, headers: Mapping[str, str], *, method: str = "POST", who: str | None = "hostile") -> bytes:
    """Return the beginning of a request, up to its body."""
    given = {"host": HOST, "content-type": "application/json", **headers}
    if who is not None:
        given |= authorization(who)
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()


def post(path: str, body: Mapping[str, Any] | bytes, **headers: str) -> bytes:
    """Return a whole request."""
    data = body if isinstance(body, bytes) else json.dumps({"model": "demo", **body}).encode()
    return head(path, {"content-length": str(len(data)), **headers}) + data


def parsed(data: bytes) -> Answer | None:
    """Return an answer that came with its length or to the connection's end; None when there is none."""
    top, _, body = data.partition(b"\r\n\r\n")
    lines = top.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) < 2 or not words[1].isdigit():
        return None
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    return Answer(int(words[1]), headers, body)


def _is_held(pids: list[int], port: int) -> bool:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if any(c.raddr and c.raddr.port == port for c in psutil.Process(pid).net_connections("tcp")):
                return True
    return False
