"""The stages of one engine, each on its own host: links that are cut, hosts that die or stand still."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

LOST_AFTER_S = 1.5
NUM_TOKENS = 600
ENV = {"PYTHONPATH": str(ROOT)}


class EngineOnHosts:
    """As many hosts as stages; rank 0 is on the first."""

    def __init__(self, network: Network, size: int = 2, interface: str = "") -> None:
        """Start the engine. `refused` is the error if it does not start."""
        self.hosts = tuple(network.host(f"stage{len(network.hosts)}") for _ in range(size))
        module, address = "tests.cluster.support.rank_zero", self.hosts[0].address
        command = (sys.executable, "-m", module, str(size), address, str(LOST_AFTER_S), interface)
        self.rank_0 = self.hosts[0].start(*command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.refused = ""
        for host in self.hosts[1:]:
            said = self.hear()
            if "refused" in said:
                self.refused = said["refused"]
                return
            worker = f"echo {said['spec']} | base64 -d | exec {sys.executable} -m engine.ranks.worker"
            host.start("sh", "-c", worker, env=ENV)
        assert self.hear() == {"up": True}

    def hear(self) -> dict[str, Any]:
        """Return the next event."""
        assert self.rank_0.stdout is not None
        said: dict[str, Any] = json.loads(self.rank_0.stdout.readline())
        return said

    def order(self, what: object) -> None:
        """Send an order."""
        assert self.rank_0.stdin is not None
        self.rank_0.stdin.write(f"{what}\n")
        self.rank_0.stdin.flush()

    def begin(self) -> None:
        """Send a request, and return after its first tokens."""
        self.order(NUM_TOKENS)
        assert not self.hear()["is_over"]

    def tokens(self) -> list[int]:
        """Return the tokens of the request that was sent last."""
        while not (said := self.hear()).get("is_over"):
            assert "tokens" in said, said
        tokens: list[int] = said["tokens"]
        return tokens

    def wait_for_loss(self) -> str:
        """Return the reason for which the engine has ended."""
        while "lost" not in (said := self.hear()):
            assert not said.get("is_over"), "the request has ended before the fault"
        reason: str = said["lost"]
        return reason

    def num_workers(self) -> int:
        """Return the number of ranks after the first that live."""
        return sum(len(host.processes("-m engine.ranks.worker")) for host in self.hosts)

    def end(self) -> None:
        """End both hosts."""
        for host in self.hosts:
            host.kill()


@pytest.fixture
def pair(network: Network) -> Iterator[EngineOnHosts]:
    pair = EngineOnHosts(network)
    yield pair
    pair.end()


def test_a_stage_that_stands_still_only_delays_the_tokens(pair: EngineOnHosts) -> None:
    """Longer than its host may be silent: its kernel still answers."""
    pair.order(NUM_TOKENS)
    expected = pair.tokens()
    assert len(expected) == NUM_TOKENS
    pair.begin()
    pair.hosts[1].pause()
    time.sleep(2 * LOST_AFTER_S)
    pair.hosts[1].resume()
    assert pair.tokens() == expected


@pytest.mark.parametrize("is_busy", [True, False])
def test_both_stages_end_soon_after_their_link_is_cut(
    network: Network, pair: EngineOnHosts, is_busy: bool
) -> None:
    if is_busy:
        pair.begin()
    assert pair.num_workers()
    pair.hosts[0].pause()  # so that no request ends before the fault
    network.cut_between(*pair.hosts)
    pair.hosts[0].resume()
    began = time.monotonic()
    reason = pair.wait_for_loss()
    assert time.monotonic() - began < LOST_AFTER_S + 2
    assert reason.startswith("the host of rank 1 does not answer: ")
    wait_until(lambda: not pair.num_workers(), timeout_s=LOST_AFTER_S + 5)
    pair.order("close")
    assert pair.hear() == {"closed": True}
    assert pair.rank_0.wait(10) == 0


def test_a_host_that_dies_ends_the_engine(pair: EngineOnHosts) -> None:
    pair.begin()
    began = time.monotonic()
    pair.hosts[0].pause()
    pair.hosts[1].kill()
    pair.hosts[0].resume()
    pair.wait_for_loss()
    assert time.monotonic() - began < LOST_AFTER_S + 2


def test_a_cut_between_later_stages_ends_the_engine(network: Network) -> None:
    """Rank 0 still reaches both of them."""
    three = EngineOnHosts(network, 3)
    three.begin()
    three.hosts[0].pause()
    network.cut_between(*three.hosts[1:])
    three.hosts[0].resume()
    began = time.monotonic()
    assert "timed out" in three.wait_for_loss()
    assert time.monotonic() - began < LOST_AFTER_S + 3
    three.end()


def test_an_interface_is_named_or_refused(network: Network) -> None:
    pair = EngineOnHosts(network, interface="eth0")
    pair.order(8)
    assert len(pair.tokens()) == 8
    pair.end()
    pair = EngineOnHosts(network, interface="eth7")
    assert "rank_interface is 'eth7'" in pair.refused
    assert f"there are lo (127.0.0.1), eth0 ({pair.hosts[0].address})" in pair.refused
    pair.end()
