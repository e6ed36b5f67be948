"""Panels say what they show and query only metrics that exist, and the files are what the code generates."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from benchmarks.dashboard_preview.data import with_variables
from deployments.config.settings import SloSettings
from monitoring.dashboards import DASHBOARDS
from monitoring.dashboards.common import OBJECTIVE
from monitoring.dashboards.grafana_json import as_text, to_json
from monitoring.dashboards.model import COLUMNS, Dashboard, Panel, PanelRow, Target, Unit
from monitoring.grafana.files import DASHBOARDS as DIRECTORY
from tests.monitoring.support.promql import problems, selectors
from tests.monitoring.support.queries import dashboard_queries

dashboards = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)


@dashboards
def test_the_committed_file_equals_the_generated_one(dashboard: Dashboard) -> None:
    committed = (DIRECTORY / f"{dashboard.uid}.json").read_text(encoding="utf-8")
    assert committed == as_text(dashboard), "run: python -m monitoring.dashboards"


def test_no_other_files_are_published() -> None:
    assert {path.stem for path in DIRECTORY.iterdir()} == {dashboard.uid for dashboard in DASHBOARDS}


@dashboards
def test_every_expression_asks_for_series_that_there_are(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        for target in panel.targets:
            assert selectors(target.expr), f"{panel.title}: {target.expr} reads nothing"
            assert problems(target.expr) == [], f"{panel.title}: {target.expr}"


@dashboards
def test_every_panel_has_a_description(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        assert len(panel.description) > 10 and panel.description.endswith("."), panel.title
        assert panel.targets and all(target.legend for target in panel.targets), panel.title
    titles = Counter(panel.title for panel in dashboard.panels())
    assert max(titles.values()) == 1, titles


@dashboards
def test_legends_distinguish_all_series_of_a_query(dashboard: Dashboard) -> None:
    """Labels that an expression groups by are in its legend, or two lines would have one name."""
    for panel in dashboard.panels():
        for target in panel.targets:
            grouping = re.match(
                r"\(*(?:\(1 - )?(?:sum|max|avg|histogram_quantile\(.*?sum) by \((.*?)\)", target.expr
            )
            for label in grouping[1].split(", ") if grouping else ():
                assert label == "le" or f"{{{{{label}}}}}" in target.legend, panel.title


@dashboards
def test_every_variable_that_is_used_is_defined_and_the_other_way_round(dashboard: Dashboard) -> None:
    text = as_text(dashboard)
    names = {variable["name"] for variable in json.loads(text)["templating"]["list"]}
    assert {"datasource", "job", "model"} <= names
    for name in names:
        assert f"${name}" in text or f"${{{name}}}" in text, name
    for target in (target for panel in dashboard.panels() for target in panel.targets):
        with_variables(target.expr, dict.fromkeys(names, "x") | {"__rate_interval": "1m"})


@dashboards
def test_panels_lie_on_the_grid_side_by_side(dashboard: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in to_json(dashboard)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < COLUMNS for x, _ in cells), panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in to_json(dashboard)["panels"]}) == len(to_json(dashboard)["panels"])


@dashboards
def test_dashboards_link_to_each_other_and_keep_the_chosen_values(dashboard: Dashboard) -> None:
    written = to_json(dashboard)
    (link,) = written["links"]
    assert set(link["tags"]) <= set(written["tags"]) and link["includeVars"] and link["keepTime"]


def test_a_line_that_does_not_fill_the_grid_is_refused() -> None:
    panel = Panel("half", "Half.", Unit.COUNT, (Target("x", "x"),), width=16)
    with pytest.raises(ValueError, match="ends in column 16 of 24"):
        PanelRow("ragged", (panel,))
    with pytest.raises(ValueError, match="ends in column 32 of 24"):
        PanelRow("wide", (panel, panel))


def test_panels_of_service_levels_show_their_targets() -> None:
    by_title, targets = {panel.title: panel for panel in DASHBOARDS[0].panels()}, SloSettings()
    assert [t.value for t in by_title["Time to first token"].thresholds] == [targets.ttft_s]
    assert [t.value for t in by_title["Time between tokens"].thresholds] == [targets.itl_s]
    assert [t.value for t in by_title["Time to the last token"].thresholds] == [targets.e2e_s]
    assert [t.value for t in by_title["Requests that met their target"].thresholds] == [OBJECTIVE]


def test_queries_are_as_prometheus_takes_them() -> None:
    """No variable is left, and a choice is put in its place."""
    queries = dashboard_queries({"model": "demo", "__rate_interval": "30s"})
    assert len(queries) == sum(len(p.targets) for d in DASHBOARDS for p in d.panels())
    assert len({query.source for query in queries}) == len(queries)
    assert not any("$" in query.expr for query in queries)
    assert any('model_name=~"demo"' in query.expr and "[30s]" in query.expr for query in queries)
    with pytest.raises(KeyError):
        with_variables("x[$__interval]", {})


def test_sparse_queries_are_few() -> None:
    """Queries that are not expected to have data are not checked against a real Prometheus."""
    sparse = [query.source for query in dashboard_queries() if not query.expects_data]
    assert len(sparse) <= 6, sparse
