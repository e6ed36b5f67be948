"""Bodies and headers that are huge, slow, endless or garbage, and connections that say nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.attackers.connections import Stranger, head, parsed, post
from benchmarks.loop_gap_cases import cases
from benchmarks.private_ray import HOST
from benchmarks.siege_answers import fault
from benchmarks.siege_app import MAX_BODY_BYTES, Target

NUM_HUGE = 16
"""Different bodies of the largest size allowed; each is made of one thing."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PIECE_S = 0.5


class Bodies(Attacker):
    """Sends what takes memory, time or a place among the connections, each kind in turn."""

    name = "bodies"

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._huge_ones: list[bytes] = []

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of bodies, headers and connections."""
        return {
            "huge": self._huge, "huge ones at once": self._many_huge, "too large": self._too_large,
            "endless": self._endless, "slow": self._slow, "slow headers": self._slow_headers,
            "endless headers": self._endless_headers, "garbage": self._garbage, "silent": self._silent,
            "many requests at once": self._pipelined,
        }  # fmt: skip

    async def _huge(self) -> None:
        await self._answered(self.draw.choice(await self._bodies()))

    async def _many_huge(self) -> None:
        """More than the ingresses take at once; some of them are refused."""
        await asyncio.gather(*(self._answered(body) for body in self.draw.sample(await self._bodies(), 8)))

    async def _too_large(self) -> None:
        size, status = self.draw.choice([(MAX_BODY_BYTES + 1, 413), (2**40, 413), (10**30, 400)])
        await self._answered(head(COMPLETIONS, {"content-length": str(size)}), status)

    async def _endless(self) -> None:
        """More than allowed, at once; where the machine is slow, the time for a body is over first."""
        async with _connected(self) as stranger:
            await stranger.send(head(CHAT, {"transfer-encoding": "chunked"}))
            piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
            reading = asyncio.create_task(stranger.read_all())
            for _ in range(4 * MAX_BODY_BYTES // 65536):
                if reading.done() or not await stranger.send(piece):
                    break
            self._judge(await reading, 413, 408)

    async def _slow(self) -> None:
        """A byte at a time: the body is never complete."""
        beginning = head(CHAT, {"content-length": "1000"})
        await asyncio.gather(*(self._drip(beginning, b'{"messages": ', 408) for _ in range(6)))

    async def _slow_headers(self) -> None:
        await asyncio.gather(*(self._drip(b"", head(CHAT, {})[:-4] + b"x" * 500, 408) for _ in range(6)))

    async def _drip(self, beginning: bytes, rest: bytes, status: int) -> None:
        async with _connected(self) as stranger:
            await stranger.send(beginning)
            reading = asyncio.create_task(stranger.read_all())
            for byte in itertools.cycle(rest):
                if reading.done() or not await stranger.send(bytes([byte])):
                    break
                await asyncio.sleep(_PIECE_S)
            self._judge(await reading, status)

    async def _endless_headers(self) -> None:
        async with _connected(self) as stranger:
            reading = asyncio.create_task(stranger.read_all())
            line = b"x-header: " + b"x" * 1000 + b"\r\n"
            await stranger.send(f"GET {self.draw.choice(['/health', '/x'])} HTTP/1.1\r\n".encode())
            while not reading.done() and await stranger.send(line):
                await asyncio.sleep(0)
            self._judge(await reading, 431)

    async def _garbage(self) -> None:
        """Another protocol, or none: the connection is ended, with an answer or without."""
        tls, http2 = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        blank, unknown = b"\r\n" * 1000, b"GET /health HTTP/9.9\r\n\r\n"
        for data in (tls, http2, blank, unknown, b"\xff" * 64, self.draw.randbytes(4096)):
            async with _connected(self) as stranger:
                await stranger.send(data)
                self._judge(await self._all(stranger, "a connection with garbage"))

    async def _silent(self) -> None:
        async def one() -> None:
            async with _connected(self) as stranger:
                await self._all(stranger, "a silent connection")

        await asyncio.gather(*(one() for _ in range(20)))

    async def _pipelined(self) -> None:
        """Thousands of requests on one connection before the first answer is read; then nobody reads any."""
        async with _connected(self) as stranger:
            one = head("/version", {}, method="GET") + head("/v1/models", {}, method="GET")
            sending = asyncio.create_task(stranger.send(one * 2000))
            await asyncio.sleep(self.draw.uniform(0, 2))
            sending.cancel()

    async def _answered(self, data: bytes, *statuses: int) -> None:
        async with _connected(self) as stranger:
            await stranger.send(data.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            self._judge(await stranger.read_all(2**25), *statuses)

    async def _all(self, stranger: Stranger, what: str) -> bytes:
        """Return what it says until it ends the connection, as it must."""
        try:
            return await stranger.read_all()
        except TimeoutError:
            self.wrong.append(f"{what} is not ended")
            return b""

    def _judge(self, data: bytes, *statuses: int) -> None:
        """A connection may end without an answer where its ingress was killed; a wrong answer is never right, and
        neither is another status, where some are expected.
        """
        answer = parsed(data)
        if answer is None:
            self.counts["ended without an answer"] += 1
            return
        self.counts[str(answer.status)] += 1
        what = fault(answer)
        if what is None and statuses and answer.status not in (*statuses, 429):
            what = f"{answer.status} {answer.body[:200]!r}, expected {' or '.join(map(str, statuses))}"
        if what is not None:
            self.wrong.append(what)

    async def _bodies(self) -> list[bytes]:
        if not self._huge_ones:
            self._huge_ones = await asyncio.to_thread(_drawn, self.draw)
        return self._huge_ones


class _connected(Stranger):
    """A connection to the ingresses."""

    def __init__(self, attacker: Attacker) -> None:
        super().__init__(HOST, attacker.target.port)


def _drawn(draw: random.Random) -> list[bytes]:
    """Return requests whose bodies are as large as allowed, or made of as many values."""
    chosen = set(draw.sample(range(sum(1 for _ in cases(1024))), NUM_HUGE))
    made = (case for number, case in enumerate(cases(MAX_BODY_BYTES)) if number in chosen)
    return [post(case.path, case.body) for case in made]
