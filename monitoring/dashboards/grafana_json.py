"""Convert a dashboard to Grafana's JSON (the classic model, which Grafana 9 to 13 read)."""

from __future__ import annotations

import json

from monitoring.dashboards.model import COLUMNS, Dashboard, Panel, Target, Variable
from monitoring.grafana.names import DATASOURCE_NAME, DATASOURCE_UID, JsonObject

SCHEMA_VERSION = 42
TAG = "raydix"
"""Tag by which the dashboards link to each other."""

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def to_json(dashboard: Dashboard) -> JsonObject:
    """Return the dashboard's JSON, without the id and version that a server assigns."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # the crosshair is shared by all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [_links()],
        "templating": {"list": [_datasource_variable(), *map(_variable, dashboard.variables)]},
        "panels": _panels(dashboard),
    }


def as_text(dashboard: Dashboard) -> str:
    """Return the text of the dashboard's file; equal dashboards give equal texts."""
    return json.dumps(to_json(dashboard), indent=2, ensure_ascii=False) + "\n"


def _links() -> JsonObject:
    """Return a link to each dashboard with our tag, which keeps the chosen variables and time range."""
    return {
        "type": "dashboards",
        "title": "Raydix",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _datasource_variable() -> JsonObject:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        # Without a datasource of that uid, Grafana takes another.
        "current": {"selected": False, "text": DATASOURCE_NAME, "value": DATASOURCE_UID},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _variable(variable: Variable) -> JsonObject:
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.label,
        "datasource": _DATASOURCE,
        "definition": variable.source,
        "query": variable.source,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "refresh": 2,  # whenever the time range changes
        "regex": "",
        "sort": 1,
    }


def _panels(dashboard: Dashboard) -> list[JsonObject]:
    """Return rows and panels in one list, as Grafana expects, with their places on the grid."""
    found: list[JsonObject] = []
    y = 0
    for row in dashboard.rows:
        position = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": position,
                "panels": [],
            }
        )
        y += 1
        for panel, x, below in row.positions():
            position = {"x": x, "y": y + below, "w": panel.width, "h": row.height}
            found.append({"id": len(found) + 1, "gridPos": position, **_panel(panel)})
        y += below + row.height
    return found


def _panel(panel: Panel) -> JsonObject:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [_target(target, index) for index, target in enumerate(panel.targets)],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _STAT if panel.kind == "stat" else _GRAPH,
    }


def _target(target: Target, index: int) -> JsonObject:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": target.expr,
        "legendFormat": target.legend,
        "editorMode": "code",
        "range": True,
        "instant": False,
    }


def _field(panel: Panel) -> JsonObject:
    steps: list[JsonObject] = [{"value": None, "color": panel.base}]
    steps += [{"value": threshold.value, "color": threshold.color} for threshold in panel.thresholds]
    field: JsonObject = {
        "unit": panel.unit.value,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if not panel.soft_min:
        field["min"] = 0
    if panel.max is not None:
        field["max"] = panel.max
    if panel.kind == "timeseries":
        field["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.is_stacked else 10,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "axisSoftMin": panel.soft_min,
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        }
    return field


_GRAPH: JsonObject = {
    "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_STAT: JsonObject = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "value",
}
