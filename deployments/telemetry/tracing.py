"""Opens tracing if it is configured; OpenTelemetry is imported only then."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from deployments.api.record.request_record import RequestRecord
from deployments.config.settings import TracingSettings

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


class Tracer(Protocol):
    """A listener that sends a trace of each request that has ended, in the background."""

    def __call__(self, record: RequestRecord) -> None:
        """Queue a request's trace; never waits."""

    def close(self) -> None:
        """Send the remaining traces. Blocks for at most about the timeout of one export. Idempotent."""


def check_tracing(settings: TracingSettings) -> None:
    """Raise RuntimeError when tracing is on and OpenTelemetry is not installed."""
    if settings.otlp_endpoint is not None and not all(map(_is_installed, _NEEDED)):
        raise RuntimeError(
            f"tracing.otlp_endpoint is {settings.otlp_endpoint}, but OpenTelemetry's SDK and OTLP exporter are "
            "not installed here: pip install 'raydix[tracing]', or remove the setting"
        )


def open_tracing(settings: TracingSettings, ingress: str) -> Tracer | None:
    """Return an ingress's tracer; None when tracing is off. Raises RuntimeError as `check_tracing` does."""
    if settings.otlp_endpoint is None:
        return None
    check_tracing(settings)
    from deployments.telemetry.spans import OtlpTracer  # imported here because it imports the SDK

    return OtlpTracer(settings, ingress)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
