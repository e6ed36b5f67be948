"""Reading JSON that may hold anything: what is not of the expected kind is not there."""

from __future__ import annotations

import math
from typing import Any


def objects(value: object) -> list[dict[str, Any]]:
    """The objects in a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number(value: object) -> float | None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -math.inf < value < math.inf else None  # math.isfinite() overflows for large ints


def text(value: object) -> str | None:
    """A string."""
    return value if isinstance(value, str) else None
