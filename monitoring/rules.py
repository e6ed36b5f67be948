"""Reads the alert and recording rules of `alerts/raydix.rules.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

RULES = Path(__file__).with_name("alerts") / "raydix.rules.yaml"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as Prometheus reads it."""

    kind: Literal["record", "alert"]
    name: str
    expr: str
    group: str
    hold: str = ""
    """How long an alert's expression must hold before it fires, such as "5m"; "": it fires immediately."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def load_rules(path: Path = RULES) -> list[Rule]:
    """Return all rules of a file, in its order. Raises KeyError or ValueError when it is no file of rules."""
    groups = yaml.safe_load(path.read_text())["groups"]
    return [_rule(group["name"], **rule) for group in groups for rule in group["rules"]]


def _rule(group: str, expr: str, record: str | None = None, alert: str | None = None, **rest: object) -> Rule:
    hold, labels, annotations = rest.get("for", ""), rest.get("labels", {}), rest.get("annotations", {})
    name = record or alert
    if name is None or not isinstance(labels, dict) or not isinstance(annotations, dict):
        raise ValueError(f"a rule of group {group} is neither a record nor an alert: {expr}")
    return Rule("record" if record else "alert", name, expr, group, str(hold), labels, annotations)
