"""Reading JSON that may hold anything: what is not of the expected kind is not there."""

from __future__ import annotations

from typing import Any

from deployments.telemetry.scrape import LARGEST


def objects(value: object) -> list[dict[str, Any]]:
    """The objects in a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number(value: object) -> float | None:
    """A number that can be a measurement."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= LARGEST else None


def text(value: object) -> str | None:
    """A string."""
    return value if isinstance(value, str) else None
