"""Whether requests are traced: the door to OpenTelemetry, none of which is imported until tracing is on."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from deployments.api.record import RequestRecord
from deployments.config.settings import TracingSettings

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


class Tracer(Protocol):
    """Hears of each request that is over, and sends its trace in its own time."""

    def __call__(self, record: RequestRecord) -> None:
        """Take a request in; never waits."""
        ...

    def close(self) -> None:
        """Send what is left, for as long as one export may take. Blocks. Idempotent."""
        ...


def check_tracing(settings: TracingSettings) -> None:
    """Raise RuntimeError when tracing is on and OpenTelemetry is not installed."""
    if settings.otlp_endpoint is not None and not all(map(_is_installed, _NEEDED)):
        raise RuntimeError(
            f"tracing.otlp_endpoint is {settings.otlp_endpoint}, but OpenTelemetry's SDK and OTLP exporter are "
            "not installed here: pip install 'raydix[tracing]', or leave the setting out"
        )


def open_tracing(settings: TracingSettings, ingress: str) -> Tracer | None:
    """The tracer of an ingress process; None when tracing is off. Raises RuntimeError as `check_tracing` does."""
    if settings.otlp_endpoint is None:
        return None
    check_tracing(settings)
    from deployments.telemetry.spans import OtlpTracer  # only here: importing it imports the SDK

    return OtlpTracer(settings, ingress)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of its packages
        return False
