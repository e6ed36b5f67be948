"""Hosts for tests, on a network that they can cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.support.network import Network, NetworkUnavailable


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """A network without hosts. Tests are skipped where the kernel refuses it."""
    try:
        with Network() as network:
            yield network
    except NetworkUnavailable as error:
        pytest.skip(str(error))
