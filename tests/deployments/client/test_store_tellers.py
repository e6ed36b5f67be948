"""What lies in files is told to an ingress by one of their readers, and by another when that is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cache.news.prefix_log import PrefixLog
from cache.news.store_log import StoreLog
from deployments.client.remote_engines import RemoteEngines
from deployments.config.settings import HealthSettings
from deployments.wire.messages import Load, NextPart, Resync, ToReplica
from deployments.wire.prefix_feed import PART_BLOCKS
from deployments.wire.server import WireServer, WireTimings
from router.addresses import store_name
from router.fleet import Fleet
from router.placer import Placer, PlacerSettings
from router.state import RouterState
from tests.deployments.support.in_process_engines import until
from tests.deployments.support.lossy_link import LossyLinks, Noted
from tests.deployments.support.time_limit import run_scenario
from tests.deployments.support.wire_peer import Requests, address_of

STORE = store_name("shared")
CHAIN = list(range(1, 2 * PART_BLOCKS + 100))


class ToldPlacer(Placer):
    """Counts the blocks that it is told of each replica and store."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet, PlacerSettings(block_tokens=16))
        self.told: Counter[str] = Counter()

    def apply_delta(self, replica: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self.told[replica] += len(stored) + len(evicted)
        super().apply_delta(replica, stored, evicted)

    def replace(self, replica: str, hashes: Sequence[int]) -> None:
        self.told[replica] += len(hashes)
        super().replace(replica, hashes)

    def extend(self, replica: str, hashes: Sequence[int]) -> None:
        self.told[replica] += len(hashes)
        super().extend(replica, hashes)

    def known(self) -> list[str]:
        """Return the replicas and stores that the index knows."""
        return self._index.replicas

    def reaches(self, num_blocks: int) -> bool:
        return self._index.reach(STORE, CHAIN, 0) == num_blocks


def _is_about_the_store(message: ToReplica) -> bool:
    return isinstance(message, Resync | NextPart) and message.is_store


def sharing(names: str, stores: Sequence[StoreLog]) -> dict[str, WireServer]:
    """Start replicas that share a directory: each of them looks at it and logs what it sees."""
    servers = {}
    for name, store in zip(names, stores, strict=True):
        own = PrefixLog()
        own.store([10**6 + ord(name)])
        timings = WireTimings(cache_period_s=0.02)
        servers[name] = WireServer("127.0.0.1", name, Load, Requests(), timings, own, 16, store=store)
        servers[name].start()
    return servers


def test_one_of_the_replicas_that_share_files_reports_them_and_another_when_it_is_gone() -> None:
    async def scenario() -> None:
        stores = [StoreLog() for _ in "abc"]
        for store in stores:
            store.store(CHAIN[:-50])
        servers = sharing("abc", stores)
        fleet = Fleet()
        placer = ToldPlacer(fleet)
        health = HealthSettings(lost_after_s=0.6)
        links = LossyLinks()
        asked = {name: Noted(_is_about_the_store) for name in servers}
        for name, noted in asked.items():
            links[name].to_replica = noted
        engines = RemoteEngines(RouterState(fleet, placer), 3, health=health, open_link=links.open)
        addresses = {name: replace(address_of(server), store=STORE) for name, server in servers.items()}
        fleet.update(addresses)
        try:
            await engines.start()
            await until(lambda: placer.reaches(len(CHAIN) - 50))
            await until(lambda: engines.num_synced == 3)
            assert placer.told == {STORE: len(CHAIN) - 50, "a": 1, "b": 1, "c": 1}
            for store in stores:  # one writes, the others see it
                store.store(CHAIN[-50:])
            await until(lambda: placer.reaches(len(CHAIN)))
            assert placer.told[STORE] == len(CHAIN)

            [first] = [name for name, noted in asked.items() if noted.messages]
            await asyncio.to_thread(servers.pop(first).close)
            for store in stores:
                store.evict(CHAIN[100:])
            await until(lambda: placer.reaches(100))
            [second] = [name for name, noted in asked.items() if noted.messages and name != first]
            fleet.update({name: addresses[name] for name in servers if name != second})
            for store in stores:
                store.evict(CHAIN[50:100])
            await until(lambda: placer.reaches(50))
            fleet.update({})
            await until(lambda: placer.known() == [])
            assert placer.reaches(0)
        finally:
            await engines.aclose()
            for server in servers.values():
                await asyncio.to_thread(server.close)

    run_scenario(scenario())
