"""Reads the JSON files of a model that may be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return what a file holds; None if there is none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; an empty one if it holds none."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}
