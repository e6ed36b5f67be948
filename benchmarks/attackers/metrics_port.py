"""Strangers at the metrics hub's own port, which asks for no key: floods, garbage, and readers that never read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.attackers.connections import Stranger, head, parsed
from benchmarks.private_ray import HOST

_PAGE = head("/metrics", {}, method="GET", who=None)


class MetricsStrangers(Attacker):
    """Connects to the hub's port, each kind of stranger in turn."""

    name = "metrics port"

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of strangers."""
        of: dict[str, Kind] = {
            "silent": self._silent, "garbage": self._garbage, "endless headers": self._endless_headers,
            "never read": self._never_read, "flood": self._flood, "other paths": self._paths,
        }  # fmt: skip
        return {kind: partial(self._unless_it_is_replaced, attack) for kind, attack in of.items()}

    async def _unless_it_is_replaced(self, attack: Kind) -> None:
        try:
            await attack()
        except OSError:
            self.counts["refused, as the hub was being replaced"] += 1

    async def _silent(self) -> None:
        await asyncio.gather(*(self._ended(b"") for _ in range(self.target.num_flood)))

    async def _garbage(self) -> None:
        await self._ended(self.draw.randbytes(5000))
        await self._ended(b"GET /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n" + b"x" * 1000)

    async def _endless_headers(self) -> None:
        await self._ended(b"GET /metrics HTTP/1.1\r\n" + b"x-header: y\r\n" * 10_000)

    async def _flood(self) -> None:
        """As many requests as fit, and all are answered: with the page, or told that there are too many."""

        async def one() -> None:
            async with Stranger(HOST, self.target.metrics_port) as stranger:
                await stranger.send(_PAGE.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
                answer = parsed(await stranger.read_all(2**24))
                self.counts[f"answered {answer.status if answer else 'not at all'}"] += 1
                if answer and answer.status not in (200, 503):
                    self.wrong.append(f"{answer.status} {answer.body[:200]!r}")

        await asyncio.gather(*(one() for _ in range(self.target.num_flood)))

    async def _never_read(self) -> None:
        async def one() -> None:
            async with Stranger(HOST, self.target.metrics_port) as stranger:
                stranger.shrink()
                await stranger.send(_PAGE * 20)
                if not await stranger.until_given_up(self.target.app.hubs()):
                    self.wrong.append("the hub keeps the connection of a client that never reads")

        await asyncio.gather(*(one() for _ in range(8)))

    async def _paths(self) -> None:
        for path in ("/", "/v1/models", "/openapi.json", "/metrics/../health", "/metrics?x=" + "y" * 4000):
            async with Stranger(HOST, self.target.metrics_port) as stranger:
                await stranger.send(head(path, {"connection": "close"}, method="GET", who=None))
                answer = parsed(await stranger.read_all(2**24))
                if answer and answer.status == 200 and not path.startswith("/metrics?"):
                    self.wrong.append(f"{path} is answered on the port that asks for no key")

    async def _ended(self, data: bytes) -> None:
        async with Stranger(HOST, self.target.metrics_port) as stranger:
            await stranger.send(data)
            try:
                await stranger.read_all()
            except TimeoutError:
                self.wrong.append(f"a connection to the metrics port is not ended after {data[:80]!r}")
