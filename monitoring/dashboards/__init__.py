"""The dashboards as code. `python -m monitoring.dashboards` writes their JSON, which is published."""

from __future__ import annotations

from monitoring.dashboards.engine import ENGINE
from monitoring.dashboards.model import Dashboard
from monitoring.dashboards.overview import OVERVIEW
from monitoring.dashboards.router import ROUTER
from monitoring.dashboards.tenants import TENANTS

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, ENGINE, ROUTER, TENANTS)

__all__ = ["DASHBOARDS"]
