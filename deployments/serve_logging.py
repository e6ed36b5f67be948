"""Where this application's processes log: to Ray Serve's logger, in the encoding that Serve is told.

What is logged in the course of a request bears its x-request-id: in an ingress because Serve knows the request, in
what delivers it and in the engine replica's call because `HandleControl` passes the id on. An engine's own thread
names requests by their ids on the wire, "<response id>-<choice>".
"""

from __future__ import annotations

import logging
from typing import Any

from deployments.settings import LogSettings

_serve_logger = logging.getLogger("ray.serve")
_PACKAGES = ("deployments", "engine", "router", "monitoring")


class _ToServe(logging.Handler):
    """Hands records on; Serve's logger may get other handlers at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        if _serve_logger.isEnabledFor(record.levelno):
            _serve_logger.handle(record)


def log_through_serve() -> None:
    """Have what our modules log in this process written where Serve writes, in its encoding. Idempotent."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        if not any(isinstance(handler, _ToServe) for handler in logger.handlers):
            logger.setLevel(logging.DEBUG)
            logger.addHandler(_ToServe())


def serve_logging(settings: LogSettings) -> dict[str, Any] | None:
    """Serve's `logging_config` of a deployment; None leaves it to the application's."""
    if settings == LogSettings(requests=settings.requests):
        return None
    config: dict[str, Any] = {"log_level": settings.level, "logs_dir": settings.directory}
    return config if settings.encoding is None else {**config, "encoding": settings.encoding.upper()}
