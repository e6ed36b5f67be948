"""Streams across hosts, whose clients reconnect: links that are cut, processes and hosts that die, full disks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from benchmarks.chaos_load import make_asks, make_resumable_asks
from tests.cluster.support.known_answers import Known, answers_under, check_undisturbed, undisturbed
from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import RayCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

NUM_STREAMS = 32
TOKENS = (150, 220)
LOST_AFTER_S = 1.0


@pytest.fixture(scope="module", autouse=True)
def application(cluster: RayCluster) -> Iterator[None]:
    """An ingress and an engine on each worker."""
    cluster.deploy(
        {
            "engine": {"model": "demo", "kv_pages": 1024, "threads": 1},
            "health": {"lost_after_s": LOST_AFTER_S},
            "admission": {"max_wait_s": 300.0},
        }
    )
    yield
    cluster.remove()


@pytest.fixture(scope="module")
def known(cluster: RayCluster) -> Known:
    """Requests of all kinds, and what they answer undisturbed."""
    return undisturbed(cluster.url, make_resumable_asks(NUM_STREAMS, seed=1, tokens=TOKENS))


def test_both_ingresses_answer_behind_the_balancer(cluster: RayCluster, known: Known) -> None:
    for worker in cluster.workers:
        assert httpx.get(f"{cluster.url_of(worker)}/ready", timeout=60).status_code == 200
    assert len(known) == NUM_STREAMS


@pytest.mark.parametrize("seconds", [0.5, 5, 60])
def test_streams_survive_a_cut_between_their_ingress_and_an_engine(
    network: Network, cluster: RayCluster, known: Known, seconds: float
) -> None:
    """The remote engine goes on generating while nothing that it sends arrives."""
    one, two = cluster.workers

    async def cut() -> None:
        with suspended(cluster):
            network.cut_between(one, two)
        await asyncio.sleep(seconds)
        network.heal_between(one, two)

    check_undisturbed(asyncio.run(answers_under(cluster.url_of(one), known, cut, cluster.url)), known)
    wait_until(cluster.is_whole)


def test_streams_survive_a_full_disk(cluster: RayCluster, known: Known) -> None:
    async def fill() -> None:
        cluster.workers[1].fill_disk()

    try:
        check_undisturbed(
            asyncio.run(answers_under(cluster.url_of(cluster.workers[0]), known, fill, cluster.url)), known
        )
    finally:
        cluster.workers[1].free_disk()
    wait_until(cluster.is_whole)


def test_streams_survive_a_pause_of_a_whole_host(cluster: RayCluster, known: Known) -> None:
    """It lasts until all streams have ended, which have to resume on the other host."""
    one, two = cluster.workers

    async def pause() -> None:
        with suspended(cluster):
            two.pause()
        two.pause()

    try:
        check_undisturbed(asyncio.run(answers_under(cluster.url_of(one), known, pause, cluster.url)), known)
    finally:
        two.resume()
    wait_until(cluster.is_whole)


@pytest.mark.parametrize("process", ["MetricsHub", "ServeController"])
def test_streams_do_not_notice_that_a_process_of_the_control_plane_is_killed_and_replaced(
    cluster: RayCluster, known: Known, process: str
) -> None:
    (victim,) = cluster.processes(process)

    async def kill() -> None:
        with suspended(cluster):
            victim.kill()

    check_undisturbed(asyncio.run(answers_under(cluster.url, known, kill, cluster.url)), known)
    wait_until(lambda: cluster.processes(process) not in ([], [victim]))
    wait_until(cluster.is_whole)


def test_streams_do_not_notice_that_the_head_is_killed_and_restarted(cluster: RayCluster, known: Known) -> None:
    """Ray's control store and Serve's controller are gone meanwhile."""
    if not cluster.outlives_head:
        pytest.skip("Redis is not installed, in which Ray's control state would outlive the head")
    before = [cluster.engine(worker).pid for worker in cluster.workers]

    async def kill() -> None:
        with suspended(cluster):
            cluster.head.kill_processes()

    check_undisturbed(asyncio.run(answers_under(cluster.url, known, kill, cluster.url)), known)
    cluster.start_head()
    wait_until(lambda: bool(cluster.processes("ServeController")))
    wait_until(cluster.is_whole)
    check_undisturbed(asyncio.run(answers_under(cluster.url, known, nothing)), known)
    assert [cluster.engine(worker).pid for worker in cluster.workers] == before


def test_streams_of_a_killed_ingress_continue_at_the_other_one(cluster: RayCluster, known: Known) -> None:
    one = cluster.workers[0]

    async def kill() -> None:
        with suspended(cluster):
            cluster.ingress(one).kill()

    outcomes = asyncio.run(answers_under(cluster.url_of(one), known, kill, cluster.url))
    assert any(outcome.num_reconnects for outcome in outcomes)
    check_undisturbed(outcomes, known)
    wait_until(cluster.is_whole)


def test_an_unmodified_client_of_a_killed_ingress_sees_that_its_answer_is_incomplete(cluster: RayCluster) -> None:
    one = cluster.workers[0]
    known = undisturbed(cluster.url, make_asks(12, seed=1, tokens=TOKENS))

    async def kill() -> None:
        with suspended(cluster):
            cluster.ingress(one).kill()

    outcomes = asyncio.run(answers_under(cluster.url_of(one), known, kill))
    assert any(outcome.is_broken_off for outcome in outcomes)
    for outcome, (_, answer) in zip(outcomes, known, strict=True):
        assert outcome.is_broken_off or outcome.answer == answer, outcome.ask.name
    wait_until(cluster.is_whole)


def test_streams_survive_the_death_of_a_host_with_their_ingress_and_their_engine(
    network: Network, cluster: RayCluster, known: Known
) -> None:
    """Those of which nothing is left are generated again, up to where their clients continue."""
    two = cluster.workers[1]

    async def kill() -> None:
        with suspended(cluster):
            two.kill()

    outcomes = asyncio.run(answers_under(cluster.url_of(two), known, kill, cluster.url))
    assert any(outcome.num_reconnects for outcome in outcomes)
    check_undisturbed(outcomes, known)
    cluster.workers[1] = network.host("three")
    cluster.join(cluster.workers[1])
    wait_until(cluster.is_whole)
    check_undisturbed(asyncio.run(answers_under(cluster.url_of(cluster.workers[1]), known, nothing)), known)


@contextmanager
def suspended(cluster: RayCluster) -> Iterator[None]:
    """Suspend both engines: no stream ends meanwhile, however fast the machine is."""
    engines = [cluster.engine(worker) for worker in cluster.workers]
    for engine in engines:
        engine.suspend()
    try:
        yield
    finally:
        for engine in engines:
            with suppress(psutil.NoSuchProcess):
                engine.resume()


async def nothing() -> None:
    """Disturb nothing."""
