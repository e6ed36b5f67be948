"""Watches for the notice that this replica's machine ends, in a thread of its own.

A notice lasts as long as its source shows it: where maintenance was cancelled, the replica serves again. A source
that cannot be read changes nothing, and is named in one warning until it can be read again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from deployments.config.settings import DrainSettings
from deployments.replica.notice_sources import METADATA, Notice, SourceName, Unreadable, source_of

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 2.0
"""Seconds that a source has for each answer."""


class NoticeWatcher:
    """The notices of one replica. Without a source (`drain.notice`), there are none, and no thread."""

    def __init__(
        self,
        settings: DrainSettings,
        replica: str,
        metadata: dict[str, str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`metadata` is where the clouds' metadata services are; `now` is the wall clock, whose times
        notices name.
        """
        self.counts: Counter[SourceName] = Counter()
        """Notices so far, by source."""
        self._settings, self._replica, self._now = settings, replica, now
        self._ends_at: float | None = None
        self._is_unreadable = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if settings.notice is not None:
            self._source, self._look = source_of(settings.notice, metadata or METADATA)
            self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._thread is not None:
            self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent; does not wait for an answer that is due."""
        self._closed.set()

    @property
    def is_leaving(self) -> bool:
        """Whether the announced end is so close that the replica leaves (`drain.leave_s`)."""
        left_s = self.seconds_left
        return left_s is not None and left_s <= self._settings.leave_s

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the announced end, at least 0; None without a notice."""
        ends_at = self._ends_at
        return None if ends_at is None else max(0.0, ends_at - self._now())

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._take(self._look(TIMEOUT_S))
            except Unreadable as error:
                self._warn(str(error))
            except Exception as error:  # A defect must not end the watch.
                self._warn(repr(error))
            self._closed.wait(self._settings.poll_s)

    def _warn(self, reason: str) -> None:
        if not self._is_unreadable:
            logger.warning(
                "drain.notice: %s cannot be read, so %s would not notice the end of its machine: %s",
                self._settings.notice,
                self._replica,
                reason,
            )
        self._is_unreadable = True

    def _take(self, notice: Notice | None) -> None:
        """Apply the result of a look that succeeded."""
        if self._is_unreadable:
            logger.info("drain.notice: %s can be read again", self._settings.notice)
        self._is_unreadable = False
        if notice is None:
            if self._ends_at is not None:
                logger.warning("%s stays: its notice was withdrawn", self._replica)
            self._ends_at = None
            return
        is_new = self._ends_at is None
        if notice.ends_at is not None:
            self._ends_at = notice.ends_at
        elif self._ends_at is None:
            self._ends_at = self._now() + self._settings.grace_s
        if is_new:
            self.counts[self._source] += 1
            seconds, reason = self.seconds_left or 0.0, notice.reason
            logger.warning(
                "the machine of %s ends in %.0f s (%s: %s)", self._replica, seconds, self._source, reason
            )
