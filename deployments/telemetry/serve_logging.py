"""Sends this application's log records to Ray Serve's logger, in Serve's configured encoding.

In an ingress, log records of a request carry its x-request-id, because Serve knows the request there. A replica
names requests by their ids on the wire, "<response id>-<choice>".
"""

from __future__ import annotations

import logging
import time
from typing import Any

from deployments.config.settings import LogSettings

_serve_logger = logging.getLogger("ray.serve")
REPEAT_S = 60.0
"""Minimum seconds between two messages of one kind from a library that repeats itself."""
_PACKAGES = ("deployments", "engine", "router", "monitoring")


class _ToServe(logging.Handler):
    """Passes records to Serve's logger, which may get other handlers at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        if _serve_logger.isEnabledFor(record.levelno):
            _serve_logger.handle(record)


class _Seldom(logging.Filter):
    """Lets each kind of message pass once every `REPEAT_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        self._passed_at = {kind: at for kind, at in self._passed_at.items() if now - at < REPEAT_S}
        return self._passed_at.setdefault(record.msg, now) == now


def log_through_serve() -> None:
    """Write the logs of Raydix's modules in this process to Serve's log, in its encoding. Idempotent."""
    for package in _PACKAGES:
        if _join(package):
            logging.getLogger(package).setLevel(logging.DEBUG)


def log_seldom_through_serve(package: str) -> None:
    """Write a library's logs only to Serve's log, a kind of message once every `REPEAT_S`."""
    if _join(package, _Seldom()):
        logging.getLogger(package).propagate = False


def _join(package: str, *filters: logging.Filter) -> bool:
    """Add the handler; return False when it was there before."""
    logger = logging.getLogger(package)
    if any(isinstance(handler, _ToServe) for handler in logger.handlers):
        return False
    handler = _ToServe()
    for each in filters:
        handler.addFilter(each)
    logger.addHandler(handler)
    return True


def serve_logging(settings: LogSettings) -> dict[str, Any] | None:
    """Return Serve's `logging_config` for a deployment; None leaves it to the application's."""
    if settings == LogSettings(requests=settings.requests, access_log=settings.access_log):
        return None
    config: dict[str, Any] = {"log_level": settings.level, "logs_dir": settings.directory}
    return config if settings.encoding is None else {**config, "encoding": settings.encoding.upper()}
