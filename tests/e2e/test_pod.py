"""The readiness probe of an ingress's pod, on a real application."""

from __future__ import annotations

import pytest

from deployments.replica import pod
from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e


def test_a_running_ingress_is_ready(service: Service) -> None:
    pod.ready_ingress(service.url, timeout_s=180)
