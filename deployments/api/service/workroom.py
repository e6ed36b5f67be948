"""State that all requests of an API share, regardless of the settings with which each began."""

from __future__ import annotations

from deployments.admission.fair_threads import FairThreads
from deployments.api.base.off_loop import num_threads
from deployments.api.http.body_memory import BodyMemory
from deployments.api.http.bounded import OpenRequests
from deployments.api.http.pacing import Pace, chunks_per_s
from deployments.api.http.unread import UnreadMemory
from deployments.api.service.api_service import ApiService
from engine.base.machine import usable_cores


class Workroom:
    """The memory, the threads, the places and the write budget of one API."""

    def __init__(self, service: ApiService) -> None:
        limits, weights = service.limits, service.access.weights
        self.pace = Pace(_chunks_per_s(service))
        self.bodies = BodyMemory(limits.max_total_body_bytes, has_tenants=bool(weights))
        self.unread = UnreadMemory(limits.max_unread_bytes, has_tenants=bool(weights))
        self.threads = FairThreads(num_threads(limits.prepare_threads, usable_cores()), "prepare", weights)
        self.open = OpenRequests()

    def take_over(self, service: ApiService) -> None:
        """Share by other settings from now on. The number of threads stays."""
        weights = service.access.weights
        self.pace.limit(_chunks_per_s(service))
        self.bodies.bound(service.limits.max_total_body_bytes, has_tenants=bool(weights))
        self.unread.bound(service.limits.max_unread_bytes, has_tenants=bool(weights))
        self.threads.weigh(weights)


def _chunks_per_s(service: ApiService) -> float | None:
    return chunks_per_s(service.limits.max_chunks_per_s, usable_cores(), has_proxy=service.is_named_outside)
