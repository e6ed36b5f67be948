"""The dashboards' JSON files: written from the code, published and provisioned as they are."""

from __future__ import annotations

import json
from pathlib import Path

from monitoring.dashboards.grafana_json import Json

DIRECTORY = Path(__file__).parent / "json"


def as_text(dashboard: Json) -> str:
    """The file's content; the same for the same dashboard."""
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


def read_all(directory: Path = DIRECTORY) -> list[Json]:
    """All dashboards, by uid."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
