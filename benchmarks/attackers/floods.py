"""Clients without a key that send much outside of bodies on many connections, and read no answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.attackers.connections import Stranger, head
from benchmarks.private_ray import HOST

MOST_BYTES = 2 * 2**20
"""Bytes that each connection sends, if the server takes them."""
PATIENCE_S = 5.0
"""Seconds for which a connection goes on when the server takes nothing more."""

_GET = f"GET / HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode()
_CHUNKED = head("/v1/completions", {"transfer-encoding": "chunked"}, who=None)
_LENGTH = head("/v1/completions", {"content-length": str(MOST_BYTES)}, who=None)
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "pipelined": (b"", _GET * 64),
    "half-sent heads": (_GET[:-2], b"a: " + b"b" * 4000 + b"\r\n"),
    "half-sent bodies": (_LENGTH, b" " * 4096),
    "many trailers": (_CHUNKED + b"1\r\n{\r\n0\r\n", b"a:b\r\n" * 1024),
    "one trailer": (_CHUNKED + b"1\r\n{\r\n0\r\na: ", b"b" * 4096),
    "extensions": (_CHUNKED + b"1;", b"b" * 4096),
    "tiny chunks": (_CHUNKED, b"1\r\n \r\n" * 1024),
    "blank lines": (b"", b"\r\n" * 2048),
    "unread": (b"", (_CHUNKED + b"1\r\n{\r\n0\r\n\r\n") * 16),
}
"""How each begins, and what it repeats."""


class Floods(Attacker):
    """Sends each flood over many connections at once, until the server ends them or takes no more."""

    name = "floods"

    def kinds(self) -> Mapping[str, Kind]:
        """Return the floods, and one that is slow."""
        floods: dict[str, Kind] = {kind: partial(self._flood, *FLOODS[kind]) for kind in FLOODS}
        return {**floods, "slow": self._slow}

    async def _flood(self, begin: bytes, repeat: bytes) -> None:
        await asyncio.gather(*(self._send(begin, repeat) for _ in range(self.target.num_flood)))

    async def _send(self, begin: bytes, repeat: bytes) -> None:
        # What was refused is not read, so its connection is reset; a full server may refuse it at once.
        with contextlib.suppress(TimeoutError, OSError):
            async with Stranger(HOST, self.target.port) as stranger:
                stranger.shrink()
                num_sent, data, takes_more = 0, begin + repeat, True
                while takes_more and num_sent < MOST_BYTES:
                    async with asyncio.timeout(PATIENCE_S):
                        takes_more = await stranger.send(data)
                    num_sent, data = num_sent + len(data), repeat

    async def _slow(self) -> None:
        await asyncio.gather(*(self._drip() for _ in range(self.target.num_flood)))

    async def _drip(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with Stranger(HOST, self.target.port) as stranger:
                for byte in _GET * 2:
                    if not await stranger.send(bytes([byte])):
                        break
                    await asyncio.sleep(0.05)
