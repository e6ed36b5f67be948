"""The readiness probe of an ingress's pod, on a real application."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e


def test_a_running_ingress_is_ready(service: Service) -> None:
    answer = httpx.get(f"{service.url}/ready", timeout=60)
    assert (answer.status_code, answer.json()) == (200, {"ready": True})
