"""An ingress's share of the work on batches: their requests go to the API within its own process."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp

from deployments.api.service.api_service import ApiService
from deployments.batch.batch_worker import BatchWorker
from deployments.batch.runner import Post
from deployments.batch.spool import Spool
from deployments.config.settings import BatchSettings
from deployments.config.tenants import ADMIN, ANONYMOUS
from deployments.ingress.in_process import InProcessApi


def batch_worker(
    spool: Spool,
    app: ASGIApp,
    service: ApiService,
    settings: BatchSettings,
    is_stopping: Callable[[], bool] = lambda: False,
) -> BatchWorker:
    """Return a worker that sends requests to `app`, the API over `service`, as the tenants that left them."""

    def post_for(name: str) -> Post | None:
        """Without a key no request is sent: the configuration may have changed since the batch was left."""
        tenant = service.access.tenant(name)
        if tenant is None and name == ANONYMOUS.name and service.access.is_open:
            tenant = ANONYMOUS
        if tenant is None and name == ADMIN.name and service.access.has_admin:
            tenant = ADMIN
        return None if tenant is None else InProcessApi(app, tenant).post

    return BatchWorker(spool, settings, post_for, service.limits.max_body_bytes, is_stopping)
