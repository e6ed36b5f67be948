"""The permanent uids of everything that Raydix publishes to Grafana, and the type of its JSON."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]

DATASOURCE_UID = "raydix-prometheus"
DATASOURCE_NAME = "Raydix Prometheus"
FOLDER_UID = "raydix"
RULE_GROUP = "raydix"
