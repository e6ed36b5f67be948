"""Serve 2.60 has no public sign that it is stopping a replica: the private field we read must exist."""

from __future__ import annotations

import asyncio
import time

import pytest
from ray import serve

from router.ray_internals import serve_is_stopping
from tests.e2e.conftest import Service
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


class Watcher:
    """A replica that reports what it sees."""

    def __init__(self) -> None:
        self.is_watching = False

    async def watch(self) -> tuple[bool, bool]:
        """Return whether the replica was being stopped at first, and in the end."""
        at_first, self.is_watching = serve_is_stopping(), True
        deadline = time.monotonic() + PATIENCE_S
        while not serve_is_stopping() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return at_first, serve_is_stopping()

    async def has_begun(self) -> bool:
        return self.is_watching


def test_a_replica_knows_from_the_first_moment_that_it_is_being_stopped(service: Service) -> None:
    deployment = serve.deployment(Watcher, ray_actor_options={"num_cpus": 0})
    handle = serve.run(deployment.bind(), name="watcher", route_prefix=None)
    answer = handle.watch.remote()
    service.wait_until(lambda: handle.has_begun.remote().result(timeout_s=PATIENCE_S) is True)
    serve.delete("watcher", _blocking=False)
    assert answer.result(timeout_s=PATIENCE_S) == (False, True)
