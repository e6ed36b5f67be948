"""Reads JSON of unknown content. A value of an unexpected type counts as missing."""

from __future__ import annotations

from typing import Any

from deployments.telemetry.scrape import LARGEST


def objects(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number(value: object) -> float | None:
    """Return a number that can be a measurement, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= LARGEST else None


def text(value: object) -> str | None:
    """Return a string, else None."""
    return value if isinstance(value, str) else None
