"""Format numbers as Grafana does."""

from __future__ import annotations

import math

from monitoring.dashboards.model import Unit

_SUFFIXES = {Unit.REQUESTS_PER_SECOND: "req/s", Unit.EVENTS_PER_SECOND: "/s", Unit.COUNT: ""}


def format_value(value: float, unit: Unit) -> str:
    """Return a value with its unit in about three digits, as Grafana shows it."""
    if not math.isfinite(value):
        return "-"
    if unit is Unit.SHARE:
        return f"{_digits(value * 100)} %"
    if unit is Unit.SECONDS:
        for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale:
                return f"{_digits(value / scale)} {name}"
        return "0 s"
    suffix = _SUFFIXES.get(unit, unit.value.partition(":")[2])
    scale, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= s), (1.0, ""))
    return f"{_digits(value / scale)} {prefix}{suffix}".rstrip()


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) >= 0.001 else 3
    text = f"{value:.{min(decimals, 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
