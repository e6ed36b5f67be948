"""Log records that are made and written together, because each by itself costs several times as much.

caller ──▶ batch: MAX_RECORDS, BATCH_S, or a warning ──▶ records ──▶ each handler: written together
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler, RotatingFileHandler
from typing import Any

logger = logging.getLogger(__name__)

BATCH_S = 0.1
"""Seconds that a record may wait for others; these records are lost when the process is killed."""
MAX_RECORDS = 256
"""Number of records that are written even before that."""

_KNOWN = (logging.StreamHandler, RotatingFileHandler)
"""Handlers that do nothing with a record but write it; other handlers, even subclasses of these, may do more."""


class LogBatches:
    """Passes records to a logger's handlers, several at a time. Lives on one event loop."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._waiting: list[Callable[[], logging.LogRecord]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, level: int, make: Callable[[], logging.LogRecord]) -> None:
        """Write a record, which `make` makes, with the next batch; a warning immediately, with those before it."""
        if not self._logger.isEnabledFor(level):
            return
        self._waiting.append(make)
        if level >= logging.WARNING or len(self._waiting) >= MAX_RECORDS:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        """Write the waiting records."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        batch = [record for make in waiting if (record := _made(make)) is not None]
        for handler in _handlers(self._logger) if batch else ():
            _write(handler, [record for record in batch if record.levelno >= handler.level])


def _made(make: Callable[[], logging.LogRecord]) -> logging.LogRecord | None:
    """Make one record; None if that fails, so that the others are not lost."""
    try:
        return make()
    except Exception:
        logger.exception("a line of the log could not be made")
        return None


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """Yield the handlers of a logger and of those to which it propagates."""
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _write(handler: logging.Handler, batch: list[logging.LogRecord]) -> None:
    """Do the same as the handler for each of the records; a file or stream of Serve's gets one write."""
    passed = [record for record in batch if handler.filter(record)]
    if not passed:
        return
    if isinstance(handler, MemoryHandler) and handler.target is not None:  # Serve's, before its file
        handler.flush()
        _write(handler.target, passed)
    elif isinstance(handler, logging.StreamHandler) and type(handler) in _KNOWN:
        _write_together(handler, passed)
    else:
        for record in passed:
            handler.handle(record)


def _write_together(handler: logging.StreamHandler[Any], batch: list[logging.LogRecord]) -> None:
    handler.acquire()
    try:
        text = "".join([handler.format(record) + handler.terminator for record in batch])
        if isinstance(handler, RotatingFileHandler) and handler.shouldRollover(batch[0]):
            handler.doRollover()
        handler.stream.write(text)
        handler.flush()
    except Exception:
        handler.handleError(batch[0])
    finally:
        handler.release()
