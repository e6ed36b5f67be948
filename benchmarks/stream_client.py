"""A client with little overhead: it sends a completion and records when each event of the answer arrives.

A client shares its processors with the measured server, so this one parses no more than that server's answers
need.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_EVENT, _END, _FINISH = b"data: {", b"\r\n0\r\n\r\n", b'"finish_reason":"'


@dataclass(slots=True)
class Answer:
    """One streamed answer; times are `time.perf_counter`."""

    sent_at: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time of each arrival, and its number of events."""
    ended_at: float = 0.0
    raw: bytearray = field(default_factory=bytearray)

    @property
    def ttft(self) -> float:
        """Seconds to the first event."""
        return self.arrivals[0][0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals."""
        times = [at for at, _ in self.arrivals]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def num_events(self) -> int:
        """Events with text."""
        return sum(count for _, count in self.arrivals)

    def check(self) -> None:
        """Raise RuntimeError unless the answer is complete."""
        if not self.raw.startswith(b"HTTP/1.1 200") or _FINISH not in self.raw:
            raise RuntimeError(f"incomplete answer: {bytes(self.raw[:2000]).decode(errors='replace')}")


class StreamClient(asyncio.Protocol):
    """A connection that is kept between requests, one at a time."""

    def __init__(self, host: str) -> None:
        self._host, self._answer = host, Answer()
        self._done: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, host: str, port: int) -> StreamClient:
        """Open a connection."""
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(f"{host}:{port}"), host, port)
        return client

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        """Send a request whose answer is a stream, and read it to its end. Raises RuntimeError when it fails."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(data)}\r\n\r\n"
        self._answer, self._done = Answer(), asyncio.get_running_loop().create_future()
        self._answer.sent_at = time.perf_counter()
        self._transport.write(head.encode() + data)
        await self._done
        self._answer.check()
        return self._answer

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        now, answer = time.perf_counter(), self._answer
        answer.raw += data
        if count := data.count(_EVENT):
            answer.arrivals.append((now, count))
        if answer.raw.endswith(_END) or not answer.raw.startswith(b"HTTP/1.1 200"):
            answer.ended_at = now
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


async def all_at_once(host: str, port: int, bodies: Sequence[dict[str, Any]], path: str) -> list[Answer]:
    """All requests at the same time, each on a connection of its own."""
    clients = [await StreamClient.connect(host, port) for _ in bodies]
    try:
        return list(await asyncio.gather(*(c.post(path, body) for c, body in zip(clients, bodies, strict=True))))
    finally:
        for client in clients:
            client.close()
