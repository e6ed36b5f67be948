"""Faults that strike a cluster while its streams run, and are repaired when the streams have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from tests.cluster.support.host import Host
from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import RayCluster
from tests.support.waiting import wait_until

APPLICATION: dict[str, Any] = {
    "engine": {"model": "demo", "kv_pages": 1024, "threads": 1},
    "health": {"lost_after_s": 1.0},
    "admission": {"max_wait_s": 300.0},
}
"""The application that the faults are for: `RayCluster` puts an ingress and an engine on each worker."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    strike: Callable[[Network, RayCluster], None]
    repair: Callable[[Network, RayCluster], None] = lambda network, cluster: None
    lasts_s: float = 0.0
    """Seconds after which it ends by itself, before the streams may have ended."""
    needs_redis: bool = False
    breaks_connections: bool = field(default=False, kw_only=True)
    """Whether clients have to connect again."""
    begins_at: Callable[[RayCluster], str] = lambda cluster: cluster.url_of(cluster.workers[0])
    """The URL at which streams begin: by default, the ingress on the first worker."""

    async def happen(self, network: Network, cluster: RayCluster) -> None:
        """Strike, and end if it is one that ends by itself."""
        with suspended(cluster):
            self.strike(network, cluster)
        if self.lasts_s:
            await asyncio.sleep(self.lasts_s)
            self.repair(network, cluster)

    def end(self, network: Network, cluster: RayCluster) -> None:
        """Repair the cluster, and wait until it is whole."""
        if not self.lasts_s:
            self.repair(network, cluster)
        wait_until(cluster.is_whole)


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


def _cut(seconds: float) -> Fault:
    """The link between the workers: the remote engine goes on generating while nothing that it sends arrives."""
    return Fault(
        lambda network, cluster: network.cut_between(*cluster.workers),
        lambda network, cluster: network.heal_between(*cluster.workers),
        lasts_s=seconds,
    )


def _kill_engine(network: Network, cluster: RayCluster) -> None:
    cluster.engine(cluster.workers[0]).kill()


def _kill_ingress(network: Network, cluster: RayCluster) -> None:
    cluster.ingress(cluster.workers[0]).kill()


def _killed(name: str) -> Fault:
    """A process of the control plane, which is replaced."""
    victims: list[psutil.Process] = []

    def strike(network: Network, cluster: RayCluster) -> None:
        victims[:] = cluster.processes(name)
        (victim,) = victims
        victim.kill()

    def repair(network: Network, cluster: RayCluster) -> None:
        wait_until(lambda: cluster.processes(name) not in ([], victims))

    return Fault(strike, repair)


def _proxy_killed() -> Fault:
    """Serve's own HTTP proxy. The one that replaces it leads to the ingresses, too."""
    killed = _killed("ProxyActor")

    def repair(network: Network, cluster: RayCluster) -> None:
        killed.repair(network, cluster)
        cluster.wait_for_answer(cluster.proxy_url)

    return replace(killed, repair=repair)


def _pause(network: Network, cluster: RayCluster) -> None:
    cluster.workers[1].pause()


def _resume(network: Network, cluster: RayCluster) -> None:
    cluster.workers[1].resume()


def _kill_head(network: Network, cluster: RayCluster) -> None:
    """Ray's control store, Serve's controller and the dashboard."""
    cluster.head.kill_processes()


def _restart_head(network: Network, cluster: RayCluster) -> None:
    engines = [cluster.engine(worker).pid for worker in cluster.workers]
    cluster.start_head()
    wait_until(lambda: bool(cluster.processes("ServeController")))
    wait_until(cluster.is_whole)
    assert [cluster.engine(worker).pid for worker in cluster.workers] == engines


def _host_dies(index: int) -> Fault:
    """A worker with its ingress and its engine. Another one replaces it."""

    def strike(network: Network, cluster: RayCluster) -> None:
        cluster.workers[index].kill()

    def repair(network: Network, cluster: RayCluster) -> None:
        cluster.workers[index] = _next_host(network)
        cluster.join(cluster.workers[index])
        cluster.balance()

    return Fault(strike, repair, breaks_connections=index == 0)


def _next_host(network: Network) -> Host:
    return network.host(f"worker{len(network.hosts)}")


FAULTS = {
    "link between hosts cut for 0.5 s": _cut(0.5),
    "link between hosts cut for 5 s": _cut(5),
    "link between hosts cut for 60 s": _cut(60),
    "full disk": Fault(
        lambda network, cluster: cluster.workers[1].fill_disk(),
        lambda network, cluster: cluster.workers[1].free_disk(),
    ),
    "host paused": Fault(_pause, _resume),
    "engine killed": Fault(_kill_engine),
    "hub killed": _killed("MetricsHub"),
    "Serve's controller killed": _killed("ServeController"),
    "Serve's proxy killed": _proxy_killed(),
    "Serve's proxy killed, under the streams": replace(
        _proxy_killed(), begins_at=lambda cluster: cluster.proxy_url, breaks_connections=True
    ),
    "head killed and restarted": Fault(_kill_head, _restart_head, needs_redis=True),
    "ingress killed": Fault(_kill_ingress, breaks_connections=True),
    "host with an engine dies": _host_dies(1),
    "host with ingress and engine dies": _host_dies(0),
}
"""Faults by name."""
