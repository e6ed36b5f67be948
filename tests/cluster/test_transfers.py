"""KV on its way between hosts, and in files: links that stall and are cut, and disks that are full."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.chaos_load import make_asks
from tests.cluster.support.known_answers import Known, answers_under, check_undisturbed, undisturbed
from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import RayCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

NUM_STREAMS, NUM_PREAMBLES = 12, 12
"""Prompts of some 500 tokens, each with a beginning of its own."""
TOKENS = (40, 60)


@pytest.fixture(scope="module", autouse=True)
def application(network: Network, cluster: RayCluster) -> Iterator[None]:
    """One engine computes prompts and another one generates, on different hosts; evicted KV goes to each host's
    own disk.
    """
    cluster.deploy(
        {
            "engine": {
                "model": "demo",
                "kv_pages": 512,
                "threads": 1,
                "host_kv_gib": 0.02,
                "host_kv_min_uses": 1,
                "kv_tier": {"directory": f"{network.directory}/kv-{{fingerprint}}", "disk_gib": 0.5},
            },
            "engines": {"roles": {"prefill": 1, "decode": 1, "disaggregate_above_tokens": 100}},
            "health": {"lost_after_s": 1.0},
            "admission": {"max_wait_s": 300.0},
        }
    )
    yield
    cluster.remove()


@pytest.fixture(scope="module")
def known(cluster: RayCluster) -> Known:
    """Requests with long prompts, and what they answer undisturbed."""
    return undisturbed(cluster.url, make_asks(NUM_STREAMS, 2, TOKENS, NUM_PREAMBLES))


def with_salt(known: Known, salt: str) -> Known:
    """Return the requests in a namespace of the cache that has no KV yet. Their answers are the same."""
    return [(replace(ask, body={**ask.body, "cache_salt": salt}), answer) for ask, answer in known]


def pages_moved(cluster: RayCluster, tier: str) -> float:
    return cluster.metric("raydix_kv_transfer_pages_total", tier=tier)


def test_kv_moves_between_the_hosts(cluster: RayCluster, known: Known) -> None:
    wait_until(lambda: pages_moved(cluster, "peer") > 0)


def test_streams_survive_a_link_that_stalls(network: Network, cluster: RayCluster, known: Known) -> None:
    """A transfer would take minutes; a request waits for it at most as long as computing takes."""
    one, two = cluster.workers
    asked = with_salt(known, "stalls")
    network.throttle(two, 200_000)
    try:
        check_undisturbed(asyncio.run(answers_under(cluster.url_of(one), asked, nothing)), asked)
    finally:
        network.throttle(two, None)
    wait_until(cluster.is_whole)


@pytest.mark.parametrize("seconds", [0.5, 5])
def test_streams_survive_a_cut_between_the_hosts_that_exchange_kv(
    network: Network, cluster: RayCluster, known: Known, seconds: float
) -> None:
    one, two = cluster.workers
    asked = with_salt(known, f"cut for {seconds}")

    async def cut() -> None:
        network.cut_between(one, two)
        await asyncio.sleep(seconds)
        network.heal_between(one, two)

    async def scenario() -> None:
        cutting = asyncio.create_task(cut())
        check_undisturbed(await answers_under(cluster.url_of(one), asked, nothing), asked)
        await cutting

    asyncio.run(scenario())
    wait_until(cluster.is_whole)


def test_streams_survive_a_full_disk_below_the_cache(cluster: RayCluster, known: Known) -> None:
    """KV was written to files before, and is again when there is room."""
    wait_until(lambda: pages_moved(cluster, "file") > 0)
    for worker in cluster.workers:
        worker.fill_disk()
    try:
        asked = with_salt(known, "full")
        check_undisturbed(asyncio.run(answers_under(cluster.url, asked, nothing)), asked)
    finally:
        for worker in cluster.workers:
            worker.free_disk()
    asked = with_salt(known, "free again")
    check_undisturbed(asyncio.run(answers_under(cluster.url, asked, nothing)), asked)


async def nothing() -> None:
    """Disturb nothing."""
