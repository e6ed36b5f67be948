"""Convert Prometheus's alert rules to Grafana-managed ones.

Prometheus fires for every series that an expression returns; Grafana fires for every series whose value is not 0,
and treats an empty result as missing data. A rule therefore has three steps, as Grafana's own import creates them:
the query, "is there a value", and a threshold on the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from monitoring.grafana.names import RULE_GROUP, JsonObject
from monitoring.grafana.recorded import written_out
from monitoring.rules import Rule, load_rules

INTERVAL_S = 60
"""How often Grafana evaluates the group."""

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_DURATION = re.compile(r"(?:\d+(?:ms|[smhdwy]))+")


def rule_group(path: Path, *, datasource_uid: str, folder_uid: str) -> JsonObject:
    """Return all alerts of a Prometheus rule file as one group, for Grafana's provisioning API.

    Raises ValueError for a file that is no rule file; OSError when it cannot be read.
    """
    try:
        rules = load_rules(path)
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a Prometheus rule file: promtool check rules says more") from None
    recorded = {rule.name: rule.expr for rule in rules if rule.kind == "record"}
    alerts = [rule for rule in rules if rule.kind == "alert"]
    if not alerts:
        raise ValueError(f"{path} has no alerts")
    try:
        converted = [_converted(alert, recorded, datasource_uid, folder_uid) for alert in alerts]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return {"title": RULE_GROUP, "folderUid": folder_uid, "interval": INTERVAL_S, "rules": converted}


def seconds(duration: str) -> float:
    """Parse a duration in the notation of Prometheus and Go, e.g. 1h30m. Raises ValueError."""
    if duration == "0":
        return 0.0
    if not _DURATION.fullmatch(duration):
        raise ValueError(f"{duration!r} is not a duration such as 5m or 1h30m")
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def _converted(alert: Rule, recorded: Mapping[str, str], datasource_uid: str, folder_uid: str) -> JsonObject:
    hold = alert.hold or "0s"
    seconds(hold)
    return {
        "uid": re.sub(r"[^a-z0-9_-]", "-", alert.name.lower())[:40],
        "title": alert.name,
        "folderUID": folder_uid,
        "ruleGroup": RULE_GROUP,
        "condition": "threshold",
        "data": _steps(written_out(alert.expr, recorded), datasource_uid),
        "for": hold,
        "noDataState": "OK",
        "execErrState": "Error",
        "isPaused": False,
        "labels": {name: str(value) for name, value in alert.labels.items()},
        "annotations": {name: _template(str(text)) for name, text in alert.annotations.items()},
    }


def _steps(expr: str, datasource_uid: str) -> list[JsonObject]:
    exists = "is_number($query) || is_nan($query) || is_inf($query)"
    above_0 = [{"evaluator": {"type": "gt", "params": [0]}}]
    return [
        _step("query", datasource_uid, {"expr": expr, "instant": True, "range": False}),
        _step("exists", "__expr__", {"type": "math", "expression": exists}),
        _step("threshold", "__expr__", {"type": "threshold", "expression": "exists", "conditions": above_0}),
    ]


def _step(name: str, datasource_uid: str, model: JsonObject) -> JsonObject:
    return {
        "refId": name,
        "datasourceUid": datasource_uid,
        "relativeTimeRange": {"from": 600, "to": 0},
        "model": {"refId": name, "intervalMs": 1000, "maxDataPoints": 43200, **model},
    }


def _template(text: str) -> str:
    """Replace $value, which in Grafana lists all steps, by the query's value, as in Prometheus."""
    return re.sub(r"\$value\b", "$values.query.Value", text)
