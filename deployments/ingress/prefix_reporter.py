"""Reports to the hub, every few seconds, the prefixes of this ingress's prompts that new replicas should
compute."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from deployments.hub.warm_up_board import PrefixReport
from deployments.telemetry.background import Background
from deployments.wire.deadlines.time_limit import timeout


class PrefixReporter(Background):
    """Sends this ingress's reports, one for each model. A hub that does not answer only misses some of them.

    `hub` is a `HubCalls`: a report is sent with the other calls of the beat that follows the period.
    """

    def __init__(
        self, hub: Any, ingress: str, reports: Callable[[], Iterable[PrefixReport]], period_s: float
    ) -> None:
        self._hub, self._ingress, self._reports, self._period_s = hub, ingress, reports, period_s

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._hub.beat()
            for report in self._reports():
                if not report.prefixes:
                    continue
                with contextlib.suppress(Exception), timeout(2 * self._period_s):
                    await self._hub.report_prefixes.remote(self._ingress, report)
