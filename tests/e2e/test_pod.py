"""What a pod's probe and its preStop hook look at, on a real application."""

from __future__ import annotations

import pytest

from deployments import pod
from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e


def test_a_running_ingress_is_ready(service: Service) -> None:
    pod.ready_ingress(service.url, timeout_s=30)


def test_what_serves_is_known_by_its_title(service: Service) -> None:
    """Draining waits for these to end: under other names it would wait for nothing."""
    titles = " ".join(pod.serving_here())
    for title in ("ServeReplica:raydix:Ingress", "ServeReplica:raydix:EngineReplica", "ray::ProxyActor"):
        assert title in titles
