"""A new ingress learns the hottest prefixes of all replicas first, and the event loop hardly notices the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from cache.news.prefix_log import PrefixLog
from deployments.client.prefix_sync import MAX_ASKED, PrefixSync
from deployments.client.remote_engines import RemoteEngines
from deployments.wire.link import DealerLink, OpenLink
from deployments.wire.messages import Load, NextPart
from deployments.wire.prefix_feed import PART_BLOCKS
from deployments.wire.server import WireServer, WireTimings
from deployments.wire.turn_budget import TURN_BLOCKS
from router.fleet import Fleet
from router.placer import Placer, PlacerSettings
from router.state import RouterState
from tests.deployments.support.in_process_engines import until
from tests.deployments.support.lossy_link import LossyLinks, Noted
from tests.deployments.support.time_limit import run_scenario
from tests.deployments.support.wire_peer import Requests, address_of, wait_until

BLOCK = 16
PARTS = 3


class Held(PrefixLog):
    """A cache's record whose snapshots stop after their first part until `rest` is set."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.rest = threading.Event()
        self.blocks = list(range(first, first + PARTS * PART_BLOCKS))
        self.store(self.blocks)
        self.drain()

    def snapshot(self) -> Iterator[int]:
        for number, block in enumerate(super().snapshot()):
            if number == PART_BLOCKS:
                self.rest.wait()
            yield block


class NotingPlacer(Placer):
    """Notes how much of each replica's cache it is told, and in which turn of the event loop."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet, PlacerSettings(block_tokens=BLOCK))
        self.turn = 0
        self.told: list[tuple[int, str, int]] = []  # turn, replica, blocks

    def apply_delta(self, replica: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self.told.append((self.turn, replica, len(stored) + len(evicted)))
        super().apply_delta(replica, stored, evicted)

    def replace(self, replica: str, hashes: Sequence[int]) -> None:
        self.told.append((self.turn, replica, len(hashes)))
        super().replace(replica, hashes)

    def holders(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """Return the replicas that hold some of a chain of blocks, and how many of the first ones."""
        return self._index.match(blocks, 0.0)

    def count_turns(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self.count_turns)

    def most_in_a_turn(self) -> int:
        turns = {turn for turn, _, _ in self.told}
        return max(sum(blocks for other, _, blocks in self.told if other == turn) for turn in turns)


@asynccontextmanager
async def replicas(
    logs: Sequence[PrefixLog], open_link: OpenLink = DealerLink
) -> AsyncIterator[tuple[RemoteEngines, NotingPlacer]]:
    """Yield an ingress that is about to connect to replicas with these caches."""
    servers = []
    for number, log in enumerate(logs):
        server = WireServer(
            "127.0.0.1",
            f"r{number}",
            Load,
            Requests(),
            WireTimings(cache_period_s=0.02),
            log,
            BLOCK,
        )
        server.start()
        servers.append(server)
    fleet = Fleet()
    placer = NotingPlacer(fleet)
    engines = RemoteEngines(RouterState(fleet, placer), len(logs), open_link=open_link)
    fleet.update({server.replica: address_of(server) for server in servers})
    try:
        yield engines, placer
    finally:
        await engines.aclose()
        await asyncio.to_thread(_close, servers)


def _close(servers: Sequence[WireServer]) -> None:
    for server in servers:
        server.close()


def test_an_ingress_is_ready_with_the_hottest_part_of_each_cache_and_the_rest_follows() -> None:
    async def scenario() -> None:
        logs = [Held(first * 10**6) for first in range(1, 6)]
        async with replicas(logs) as (engines, placer):
            await engines.start()
            assert await engines.wait_for_prefixes(60)
            assert len(engines.reachable()) == 5 and engines.num_synced == 0
            known = {name: blocks for _, name, blocks in placer.told}
            assert known == {f"r{number}": PART_BLOCKS for number in range(5)}
            for number, log in enumerate(logs):
                assert placer.holders(log.blocks[:PART_BLOCKS]) == {f"r{number}": PART_BLOCKS}
                log.rest.set()
            await until(lambda: engines.num_synced == 5)
            for number, log in enumerate(logs):
                assert placer.holders(log.blocks) == {f"r{number}": PARTS * PART_BLOCKS}

    run_scenario(scenario())


def test_one_turn_of_the_event_loop_takes_in_few_blocks_however_many_replicas_have_news() -> None:
    async def scenario() -> None:
        logs = [PrefixLog() for _ in range(16)]
        async with replicas(logs) as (engines, placer):
            placer.count_turns()
            await engines.start()
            await until(lambda: engines.num_synced == 16)
            placer.told.clear()
            news = [range(number * 10**6, number * 10**6 + 3 * PART_BLOCKS) for number in range(16)]
            for log, blocks in zip(logs, news, strict=True):
                log.store(blocks)
            # The loop stands still until all have sent their news. On a machine so slow that replicas give it up
            # meanwhile, their snapshots come, too, also in parts.
            wait_until(lambda: all(sum(1 for _ in log.snapshot()) == 3 * PART_BLOCKS for log in logs))
            await until(lambda: sum(blocks for _, _, blocks in placer.told) >= 16 * 3 * PART_BLOCKS)
            await until(lambda: all(placer.holders(own) == {f"r{n}": len(own)} for n, own in enumerate(news)))
            assert max(blocks for _, _, blocks in placer.told) <= PART_BLOCKS
            assert placer.most_in_a_turn() < TURN_BLOCKS + PART_BLOCKS

    run_scenario(scenario())


def test_parts_are_asked_for_a_few_at_a_time_and_those_of_new_replicas_first() -> None:
    async def scenario() -> None:
        asked: list[str] = []
        sync = PrefixSync(asked.append)

        async def take(replica: str, *, is_last: bool = False) -> None:
            num_asked = len(asked)
            sync.took(replica, is_first=False, is_last=is_last, seconds=0.0)
            assert len(asked) == num_asked  # as long as taking it in has lasted, nothing is asked
            await asyncio.sleep(0.001)  # a timer after that of the pause

        for replica in "abc":
            sync.begin(replica)
        assert asked == ["a", "b"] and len(asked) == MAX_ASKED
        await take("a")
        assert asked == ["a", "b", "c"]
        sync.begin("d")
        await take("b")
        await take("c")
        assert asked == ["a", "b", "c", "d", "a"]
        sync.leave("d")
        assert asked[5:] == ["b"]
        await take("a", is_last=True)
        await take("b")
        assert asked[6:] == ["c", "b"]
        sync.close()

    run_scenario(scenario())


def test_a_part_whose_request_is_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.wire.connection.RESYNC_S", 0.2)

    async def scenario() -> None:
        log, links = Held(1), LossyLinks()
        links["r0"].to_replica = requests = Noted(lambda message: isinstance(message, NextPart), num_lost=1)
        async with replicas([log], links.open) as (engines, placer):
            log.rest.set()
            await engines.start()
            await until(lambda: engines.num_synced == 1)
            assert len(requests.messages) > 1
            assert placer.holders(log.blocks) == {"r0": PARTS * PART_BLOCKS}

    run_scenario(scenario())
