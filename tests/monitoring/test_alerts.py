"""The alert rules: right for Prometheus, for the table of metrics and for the runbook, and each shown to fire."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.dashboards import DASHBOARDS
from monitoring.rules import RULES, Rule, load_rules
from tests.monitoring.support.promql import problems
from tests.monitoring.support.queries import alert_queries, recorded_labels

MONITORING = RULES.parents[1]
RUNBOOK = MONITORING / "RUNBOOK.md"
CASES = sorted(RULES.parent.glob("*.test.yaml"))
ALERTS = [rule for rule in load_rules() if rule.kind == "alert"]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed; Debian has it in the package prometheus"
)


def promtool(*arguments: object) -> tuple[bool, str]:
    """Return whether promtool succeeded, and its output."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=600)
    return done.returncode == 0, done.stdout + done.stderr


def misfits(path: Path = RULES) -> list[str]:
    """Return the parts of the rules that do not fit the table of metrics."""
    rules = load_rules(path)
    recorded = recorded_labels(rules)
    return [f"{rule.name}: {problem}" for rule in rules for problem in problems(rule.expr, recorded)]


def thresholds(rule: Rule) -> list[str]:
    """Return the comparisons in a rule's expression, such as "> 14.4 * 0.01"."""
    return re.findall(r"(?:[=!<>]=|[<>])\s*\d[\d.]*(?:\s*\*\s*[\d.]+)?", rule.expr)


def sections() -> dict[str, str]:
    """The runbook's text by heading."""
    parts = re.split(r"^## (.*)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


@cache
def alert_cases() -> list[dict[str, Any]]:
    """All cases of alerts; to read the files takes half a second."""
    tests = [test for path in CASES for test in yaml.safe_load(path.read_text())["tests"]]
    return [case for test in tests for case in test["alert_rule_test"]]


@needs_promtool
def test_prometheus_accepts_the_rules_and_the_configuration() -> None:
    for arguments in (
        ("check", "rules", "--lint-fatal", RULES),
        ("check", "config", MONITORING / "prometheus.yml"),
    ):
        accepted, said = promtool(*arguments)
        assert accepted, said


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    passed, said = promtool("test", "rules", *CASES)
    assert passed, said


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_every_alert_has_cases_that_fire_and_that_do_not(rule: Rule) -> None:
    cases = [case for case in alert_cases() if case["alertname"] == rule.name]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


def test_all_that_the_rules_read_is_served() -> None:
    assert misfits() == []


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_alerts_describe_the_fault_and_link_to_the_runbook(rule: Rule) -> None:
    assert set(rule.labels) == {"severity"} and rule.labels["severity"] in ("page", "ticket")
    assert set(rule.annotations) == {"summary", "description", "runbook_url"}
    assert "$value" in rule.annotations["description"] or rule.expr.startswith("absent(")
    assert rule.annotations["runbook_url"] == f"monitoring/RUNBOOK.md#{rule.name.lower()}"


def test_an_alert_can_be_asked_for_although_it_does_not_fire() -> None:
    """Otherwise an alert that never can fire looks like a healthy service."""
    queries = {query.source: query for query in alert_queries()}
    for rule in ALERTS:
        assert queries[f"alert {rule.name}"].expr == rule.expr
        assert queries[f"alert {rule.name}, answered"].expr.count(" bool ") == len(thresholds(rule))
    later = {source for source, query in queries.items() if source.endswith("answered") and not query.expects_data}
    names = ("GPUIdle", "HitRateCollapse", "MetricsAbsent", "RolledBack")
    assert later == {f"alert Raydix{name}, answered" for name in names}


# --- the runbook -------------------------------------------------------------------------------------------


def test_the_runbook_has_a_section_for_each_alert() -> None:
    headings = [heading for heading in sections() if heading.startswith("Raydix")]
    assert sorted(headings) == sorted(rule.name for rule in ALERTS)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_the_runbook_states_severity_and_thresholds_as_they_are(rule: Rule) -> None:
    section = sections()[rule.name]
    first = section.split("\n\n")[0]
    stated = [
        each for each in re.findall(r"`([^`]*)`", first) if re.match(r"[=!<>]|\d+[smhd]$|page$|ticket$", each)
    ]
    assert set(stated) == {rule.labels["severity"], rule.hold, *thresholds(rule)} - {""}
    assert "**Look" in section and ("**Do.**" in section or "and **do**" in section)


def test_the_runbook_names_panels_that_exist() -> None:
    text = RUNBOOK.read_text()
    panels = {(board.uid.removeprefix("raydix-"), panel.title) for board in DASHBOARDS for panel in board.panels()}
    shown = {(board.lower(), title) for board, title in re.findall(r"\*\*(\w+): ([^*]+)\*\*", text)}
    assert len(shown) > 20 and shown - panels == set()


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("raydix_queue_oldest_age_seconds", "raydix_queue_oldest_age"),
        ("(raydix_engine_up)", "(raydix_engines_up)"),
        ('outcome!="resumed"', 'outcome!="resume"'),
        ("queue_full|unavailable", "queue_ful|unavailable"),
        ('raydix_kv_pages{state="active"', 'raydix_kv_pages{kind="active"'),
        ("max by (job, model_name, replica) (raydix_queue", "max by (job, model, replica) (raydix_queue"),
        ('increase(raydix_preemptions_total{replica!="gone"}[5m])', "increase(raydix_preemptions_total[5m])"),
        ('increase(raydix_engine_steps_total{replica!="gone"}[2m])', "rate(raydix_requests_running[2m])"),
        ("avg_over_time(raydix:kv_active:ratio[5m])", "avg_over_time(raydix:kv_actve:ratio[5m])"),
    ],
)
def test_an_error_that_prometheus_cannot_detect_is_caught(right: str, wrong: str, tmp_path: Path) -> None:
    assert misfits(_spoiled(tmp_path, right, wrong)) != []


@needs_promtool
@pytest.mark.parametrize(
    ("cases", "right", "wrong"),
    [
        ("slo", 'and raydix:slo_missed:ratio_rate1h{slo="ttft"} > 14.4 * 0.01', ""),
        ("slo", 'ratio_rate5m{slo="itl"} > 14.4', 'ratio_rate5m{slo="ttft"} > 14.4'),
        ("slo", 'increase1h{slo="ttft"} >= 10', 'increase1h{slo="ttft"} >= 1'),
        ("engine", "$value | humanizePercentage", "$value"),
        ("requests", 'status=~"5.."', 'status=~"[45].."'),
        ("requests", "and raydix:server_errors:increase5m >= 10", ""),
        ("requests", "for: 5m", "for: 0m"),
        ("engine", "or max by (job, model_name) (raydix_replicas_expected) * 0", ""),
        ("engine", "and on (job, model_name) (", "and on (job, model_name, replica) ("),
        ("engine", ") == 0", ") <= 1000"),
        ("engine", "> 0.95", "> 95"),
        ("engine", "for: 10m", "for: 0m"),
        ("cache", "> 100\n", "> 1\n"),
        ("cache", "and raydix:prefix_cache_hit:ratio1d_offset1h > 0.1", ""),
        ("router", 'outcome!="resumed"', 'outcome="resumed"'),
        ("metrics", "malformed|too_large", "malformed|too_large|out_of_order"),
        ("metrics", "severity: ticket", "severity: page"),
    ],
)
def test_a_change_of_when_an_alert_fires_is_caught(cases: str, right: str, wrong: str, tmp_path: Path) -> None:
    _spoiled(tmp_path, right, wrong)
    shutil.copy(RULES.parent / f"{cases}.test.yaml", tmp_path)
    passed, said = promtool("test", "rules", tmp_path / f"{cases}.test.yaml")
    assert not passed and "FAILED" in said


def _spoiled(directory: Path, right: str, wrong: str) -> Path:
    """A copy of the rules with a mistake, wherever `right` stands."""
    rules = RULES.read_text()
    assert right in rules, "this mistake can no longer be made"
    spoiled = directory / RULES.name
    spoiled.write_text(rules.replace(right, wrong))
    return spoiled
