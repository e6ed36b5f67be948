"""Requests that wait in the admission of ingresses, as reported by those that chose this replica.

An ingress reports to only one replica, or to one of each role (`deployments/client/remote_engines.py`), and each
replica passes the reports on to Serve's autoscaler, so a sum over the replicas of a deployment counts every
ingress once. A report counts until the ingress's session ends, or it is silent for `STALE_S`.
"""

from __future__ import annotations

from typing import NamedTuple

from deployments.wire.messages import Backlog

STALE_S = 3.0
"""Seconds for which a report counts; an ingress sends several in that time."""


class BacklogTotals(NamedTuple):
    """The sums over the ingresses that report here."""

    num_requests: int = 0
    """Requests that wait now."""
    num_tokens: int = 0
    """Their uncached prompt tokens."""
    turned_away: int = 0
    """Requests that left without an engine, since the start."""
    unserved_tokens: int = 0
    """Tokens by which the queues have become longer, and those of requests that left without an engine, since the
    start. An ingress that begins or stops reporting here changes nothing."""
    unserved_requests: int = 0
    """The same in requests."""


class Backlogs:
    """Keeps the last report of each ingress. `now` is in seconds, on one clock. Its owner locks."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Backlog]] = {}
        self._turned_away = self._unserved_tokens = self._unserved_requests = 0

    def take(self, ingress_id: str, report: Backlog, now: float) -> None:
        """Store an ingress's report, and count the changes since its last one."""
        self._drop_stale(now)
        if ingress_id in self._reports:
            _, last = self._reports[ingress_id]
            turned_away = max(0, report.turned_away - last.turned_away)
            self._turned_away += turned_away
            self._unserved_requests += report.num_requests - last.num_requests + turned_away
            self._unserved_tokens += report.num_tokens - last.num_tokens
            self._unserved_tokens += max(0, report.turned_away_tokens - last.turned_away_tokens)
        self._reports[ingress_id] = (now, report)

    def forget(self, ingress_id: str) -> None:
        """Drop the report of an ingress whose session has ended. There may be none."""
        self._reports.pop(ingress_id, None)

    def totals(self, now: float) -> BacklogTotals:
        """Return the sums over all reports that still count."""
        self._drop_stale(now)
        waiting = [report for _, report in self._reports.values()]
        return BacklogTotals(
            sum(report.num_requests for report in waiting),
            sum(report.num_tokens for report in waiting),
            self._turned_away,
            self._unserved_tokens,
            self._unserved_requests,
        )

    def _drop_stale(self, now: float) -> None:
        for ingress_id in [name for name, (at, _) in self._reports.items() if now - at > STALE_S]:
            del self._reports[ingress_id]
