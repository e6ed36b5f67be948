"""A replica with stages on two hosts serves, and its streams survive a cut between them and a host that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from benchmarks.chaos_load import make_asks
from tests.cluster.support.host import Host
from tests.cluster.support.known_answers import Known, answers_under, check_undisturbed, undisturbed
from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import RayCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

LOST_AFTER_S = 1.5
APPLICATION = {
    "engine": {"model": "demo", "kv_pages": 1024, "threads": 1, "pipeline_parallel_size": 2},
    "engines": {"count": 1, "num_cpus": 2, "placement": "spread"},
    "admission": {"max_wait_s": 300.0},
}


@pytest.fixture(scope="module", autouse=True)
def application(network: Network, cluster: RayCluster) -> Iterator[None]:
    """An ingress on each worker, and one engine on both."""
    beats = {"beat_directory": f"{network.directory}/beats"}
    cluster.deploy({**APPLICATION, "health": {"lost_after_s": LOST_AFTER_S, "migration_wait_s": 180.0, **beats}})
    yield
    cluster.remove()


@pytest.fixture(scope="module")
def known(cluster: RayCluster) -> Known:
    """Requests, and what they answer undisturbed."""
    return undisturbed(cluster.url, make_asks(12, seed=1, tokens=(150, 220)))


def hosts_of_stages(cluster: RayCluster) -> list[Host]:
    """Return the host of each stage."""
    found = [
        [worker for worker in cluster.workers if worker.processes(name)]
        for name in ("ServeReplica:raydix:EngineReplica", "ray::Rank")
    ]
    assert [len(hosts) for hosts in found] == [1, 1]
    return [hosts[0] for hosts in found]


def test_each_stage_marks_a_file_on_its_own_host(network: Network, cluster: RayCluster) -> None:
    """By which a probe finds each host ready."""
    first, second = hosts_of_stages(cluster)
    assert first is not second
    wait_until(lambda: second.run("ls", f"{network.directory}/beats").startswith("rank-1-"))
    assert "rank" not in first.run("ls", f"{network.directory}/beats")


def test_streams_continue_when_the_link_between_the_stages_was_cut(
    network: Network, cluster: RayCluster, known: Known
) -> None:
    first, second = hosts_of_stages(cluster)

    async def cut() -> None:
        engine = cluster.engine(first)
        engine.suspend()
        network.cut_between(first, second)
        engine.resume()
        began = time.monotonic()
        await asyncio.to_thread(wait_until, lambda: cluster.health(first)["status"] != "healthy")
        assert time.monotonic() - began < LOST_AFTER_S + 4
        network.heal_between(first, second)

    check_undisturbed(asyncio.run(answers_under(cluster.url_of(first), known, cut)), known)
    wait_until(cluster.is_whole)


def test_streams_continue_when_the_host_of_a_stage_has_died(
    network: Network, cluster: RayCluster, known: Known
) -> None:
    """Another host has room for the stage."""
    first, second = hosts_of_stages(cluster)
    spare = network.host(f"worker{len(network.hosts)}")
    cluster.join(spare)
    wait_until(lambda: bool(spare.processes("raylet")))

    async def die() -> None:
        engine = cluster.engine(first)
        engine.suspend()
        second.kill()
        engine.resume()
        cluster.workers[cluster.workers.index(second)] = spare

    check_undisturbed(asyncio.run(answers_under(cluster.url_of(first), known, die)), known)
    cluster.balance()
    wait_until(cluster.is_whole)
    assert sorted(host.name for host in hosts_of_stages(cluster)) == sorted(host.name for host in (first, spare))
