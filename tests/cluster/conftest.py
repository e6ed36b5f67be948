"""Hosts on a network that tests can cut, and Ray on three of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.support import balancer
from tests.cluster.support.network import Network, NetworkUnavailable
from tests.cluster.support.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """A network without hosts. Tests are skipped where the kernel refuses it."""
    try:
        with Network() as network:
            yield network
    except NetworkUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(network: Network) -> RayCluster:
    """Ray on a head and two workers, without an application."""
    if balancer.program() is None:
        pytest.skip("HAProxy is not installed")
    return RayCluster(network)
