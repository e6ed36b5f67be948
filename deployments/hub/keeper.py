"""An ingress's side of the hub: it reads the metrics page and keeps the checkpoint that the next hub needs.

The hub holds its totals only in memory. So each page comes with the checkpoint it was made from, each ingress
keeps the newest, and a new hub asks for it before it shows a page: Prometheus sees no counter reset.
"""

from __future__ import annotations

import contextlib
from typing import Any

from deployments.client.protocol import Unavailable
from deployments.hub.deployment import NOT_READY
from deployments.telemetry.background import Background
from deployments.wire.deadlines.time_limit import timeout
from monitoring.checkpoint import Kept


class MetricsKeeper(Background):
    """Reads the page and keeps its checkpoint. Belongs to the ingress's event loop."""

    def __init__(self, hub: Any, name: str, timeout_s: float = 5.0) -> None:
        """`hub` is a `HubCalls`. `name` identifies this ingress; the hub has `timeout_s` to answer a call."""
        self._hub, self._name, self._timeout_s = hub, name, timeout_s
        self._kept: Kept | None = None

    async def read_page(self) -> tuple[bytes, str]:
        """Read the page and its content type. Raises Unavailable when there is no complete page."""
        try:
            with timeout(self._timeout_s):
                page = await self._hub.render.remote()
        except Exception as error:
            reason = "in time" if isinstance(error, TimeoutError) else f"({type(error).__name__})"
            raise Unavailable(
                f"The metrics hub does not answer {reason}. If it has died, Serve replaces it; try again."
            ) from None
        if page is None:
            raise Unavailable(NOT_READY)
        body, content_type, kept = page
        self._hold(kept)
        return body, content_type

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(Exception), timeout(self._timeout_s):  # without an answer, ask again
                await self._keep()
            await self._hub.beat()

    async def _keep(self) -> None:
        held = self._kept
        is_wanted, newer = await self._hub.keep.remote(self._name, None if held is None else held[0])
        if is_wanted and held is not None:
            await self._hub.restore.remote(self._name, held[1])
        self._hold(newer)

    def _hold(self, kept: Kept | None) -> None:
        if kept is not None and (self._kept is None or kept[0] > self._kept[0]):
            self._kept = kept
