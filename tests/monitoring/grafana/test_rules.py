"""Prometheus' alert rules say the same as Grafana's: each fires when the other one does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.grafana.files import datasource, write
from monitoring.grafana.names import DATASOURCE_UID, FOLDER_UID, JsonObject
from monitoring.grafana.recorded import written_out
from monitoring.grafana.rules import rule_group, seconds
from monitoring.rules import RULES, load_rules
from tests.monitoring.support.promql import problems

CASES = sorted(RULES.parent.glob("*.test.yaml"))


def converted() -> list[JsonObject]:
    rules: list[JsonObject] = rule_group(RULES, datasource_uid="prometheus", folder_uid="raydix")["rules"]
    return rules


def expr(rule: JsonObject) -> str:
    return str(rule["data"][0]["model"]["expr"])


def test_every_alert_is_converted_and_no_recording_rule_is_left() -> None:
    alerts = [rule.name for rule in load_rules() if rule.kind == "alert"]
    assert [rule["title"] for rule in converted()] == alerts
    assert len({rule["uid"] for rule in converted()}) == len(alerts)
    for rule in converted():
        assert problems(expr(rule)) == [], rule["title"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_the_cases_of_the_alerts_hold_for_the_queries_of_grafana(case: Path, tmp_path: Path) -> None:
    """The same series raise the same alerts at the same moments, though nothing is recorded."""
    rules = [
        {
            "alert": rule["title"],
            "expr": expr(rule),
            "for": rule["for"],
            "labels": rule["labels"],
        }
        for rule in converted()
    ]
    (tmp_path / RULES.name).write_text(yaml.safe_dump({"groups": [{"name": "raydix", "rules": rules}]}))
    cases = yaml.safe_load(case.read_text())
    cases["group_eval_order"] = ["raydix"]
    for one in cases["tests"]:
        one.pop("promql_expr_test", None)  # of recorded series
        for alert in (alert for test in one["alert_rule_test"] for alert in test["exp_alerts"]):
            alert.pop(
                "exp_annotations", None
            )  # Grafana's templates are its own; means of fewer points differ a little
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(cases))
    command = ["promtool", "test", "rules", "case.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_value_of_0_fires_too() -> None:
    """Any series that Prometheus returns fires, whatever its value; the threshold is on whether there is one."""
    steps = {step["refId"]: step for rule in converted() for step in rule["data"]}
    assert "is_number($query)" in steps["exists"]["model"]["expression"]
    assert steps["threshold"]["model"]["expression"] == "exists"
    assert {rule["condition"] for rule in converted()} == {"threshold"}


def test_the_value_in_a_text_is_the_querys() -> None:
    texts = [text for rule in converted() for text in rule["annotations"].values()]
    assert any("$values.query.Value | humanize" in text for text in texts)
    assert not any(re.search(r"\$value\b", text) for text in texts)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("a:b > 1", "(sum by (slo) (raydix_x{met=\"no\"})) > 1"),
        ('a:b{slo="itl"}', '(sum by (slo) (raydix_x{met="no", slo="itl"}))'),
        ("max(x:y[30m] offset 1h)", "max((raydix_z)[30m:1m] offset 1h)"),
        ("max(x:y[2d])", "max((raydix_z)[2d:5m])"),
        ('c:d{slo="itl"}', '((sum by (slo) (raydix_x{met="no", slo="itl"})) / raydix_y{slo="itl"})'),
    ],
)  # fmt: skip
def test_recorded_series_are_written_out(expr: str, expected: str) -> None:
    recorded = {"a:b": 'sum by (slo) (raydix_x{met="no"})', "c:d": "a:b / raydix_y", "x:y": "raydix_z"}
    assert written_out(expr, recorded) == expected


@pytest.mark.parametrize("expr", ["no:such > 1", "a:b offset 1h"])
def test_an_expression_that_cannot_be_expanded_is_an_error(expr: str) -> None:
    with pytest.raises(ValueError, match=r"recording rule|record it"):
        written_out(expr, {"a:b": "raydix_x"})


def test_durations_are_read_as_seconds() -> None:
    assert [seconds(text) for text in ("0", "0s", "90s", "1h30m", "500ms")] == [0, 0, 90, 5400, 0.5]
    for text in ("", "5", "m5", "5m "):
        with pytest.raises(ValueError, match="is not a duration"):
            seconds(text)


@pytest.mark.parametrize("content", ["- 1", "groups: [{name: a, rules: [{expr: x}]}]", "a: [", "groups: []"])
def test_a_file_without_alerts_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"rules\.yaml (is not a Prometheus rule file|has no alerts)"):
        rule_group(path, datasource_uid="d", folder_uid="f")


def test_the_written_files_are_those_that_are_published(tmp_path: Path) -> None:
    """They go together: one datasource uid, one folder, the dashboards' path, the same rules."""
    written = {str(path.relative_to(tmp_path)) for path in write(tmp_path)}
    assert {f"dashboards/raydix-{name}.json" for name in ("overview", "engine", "router", "tenants")} <= written
    read = {
        kind: yaml.safe_load((tmp_path / "provisioning" / kind / "raydix.yaml").read_text())
        for kind in ("datasources", "dashboards", "alerting")
    }
    (source,) = read["datasources"]["datasources"]
    assert {**source, "url": "u"} == {**datasource("u")} and source["uid"] == DATASOURCE_UID
    (provider,) = read["dashboards"]["providers"]
    (group,) = read["alerting"]["groups"]
    assert provider["folderUid"] == FOLDER_UID and provider["folder"] == group["folder"]
    assert [rule["title"] for rule in group["rules"]] == [rule["title"] for rule in converted()]


def test_a_dollar_in_a_label_is_no_environment_variable_in_files(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rule = {"alert": "A", "expr": "up == 0", "labels": {"where": "{{ $labels.job }}"}}
    rules.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    *_, alerting = write(tmp_path / "out", rules)
    (group,) = yaml.safe_load(alerting.read_text())["groups"]
    assert group["rules"][0]["labels"] == {"where": "{{ $$labels.job }}"}
