"""Streams across hosts, whose clients reconnect: links that are cut, processes and hosts that die, full disks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.chaos_load import Outcome, drive, make_asks, make_resumable_asks
from tests.cluster.support.faults import APPLICATION, FAULTS
from tests.cluster.support.known_answers import Known, answers_under, check_undisturbed, client_of, undisturbed
from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import RayCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

NUM_STREAMS = 24
TOKENS = (150, 220)


@pytest.fixture(scope="module", autouse=True)
def application(cluster: RayCluster) -> Iterator[None]:
    """An ingress and an engine on each worker."""
    cluster.deploy(APPLICATION)
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


def test_an_unmodified_client_of_a_killed_ingress_sees_that_its_answer_is_incomplete(
    network: Network, cluster: RayCluster
) -> None:
    known = undisturbed(cluster.url, make_asks(12, seed=1, tokens=TOKENS))
    one, fault = cluster.workers[0], FAULTS["ingress killed"]
    outcomes = asyncio.run(answers_under(cluster.url_of(one), known, lambda: fault.happen(network, cluster)))
    assert any(outcome.is_broken_off for outcome in outcomes)
    for outcome, (_, answer) in zip(outcomes, known, strict=True):
        assert outcome.is_broken_off or outcome.answer == answer, outcome.ask.name
    wait_until(cluster.is_whole)


@pytest.mark.parametrize("name", FAULTS)
def test_no_stream_is_lost_or_different(network: Network, cluster: RayCluster, known: Known, name: str) -> None:
    """Their clients reconnect. What is left of nowhere is generated again, up to where the client continues."""
    fault = FAULTS[name]
    if fault.needs_redis and not cluster.outlives_head:
        pytest.skip("Redis is not installed, in which Ray's control state would outlive the head")
    try:
        outcomes = asyncio.run(
            answers_under(fault.begins_at(cluster), known, lambda: fault.happen(network, cluster), cluster.url)
        )
    finally:
        fault.end(network, cluster)
    check_undisturbed(outcomes, known)
    assert any(outcome.num_reconnects for outcome in outcomes) == fault.breaks_connections


def test_a_rolling_update_under_load_loses_no_stream(cluster: RayCluster, known: Known) -> None:
    """Each engine and each ingress is replaced by another one, while clients ask again and again."""
    engines = [cluster.engine(worker).pid for worker in cluster.workers]

    async def scenario() -> list[Outcome]:
        stop = asyncio.Event()
        changed = {**APPLICATION, "engine": {**APPLICATION["engine"], "kv_pages": 1100}}
        async with client_of(cluster.url) as client, asyncio.TaskGroup() as group:
            asked = group.create_task(drive(client, [ask for ask, _ in known], stop, at_once=8))
            await asyncio.to_thread(cluster.deploy, changed)
            stop.set()
        return asked.result()

    outcomes = asyncio.run(scenario())
    answers = {ask.name: answer for ask, answer in known}
    check_undisturbed(outcomes, [(outcome.ask, answers[outcome.ask.name]) for outcome in outcomes])
    assert not {cluster.engine(worker).pid for worker in cluster.workers} & set(engines)
