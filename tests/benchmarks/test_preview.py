"""Pictures of dashboards: numbers with their units, and pages that draw whatever Prometheus returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.dashboard_preview.data import EVERYTHING, STEPS, PrometheusView
from benchmarks.dashboard_preview.drawing import draw
from benchmarks.dashboard_preview.units import format_value
from monitoring.dashboards import DASHBOARDS
from monitoring.dashboards.model import Dashboard, Panel, Target, Unit

START, END = 1_700_000_000.0, 1_700_000_000.0 + STEPS - 1


def source(*results: Mapping[str, object]) -> PrometheusView:
    """A Prometheus that answers every query alike."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert "$" not in request.url.params["query"]
        return httpx.Response(200, json={"data": {"resultType": "matrix", "result": list(results)}})

    client = httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(answer))
    return PrometheusView(client, START, END, EVERYTHING)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, Unit.SECONDS, "0 s"),
        (0.0123, Unit.SECONDS, "12.3 ms"),
        (2.5e-5, Unit.SECONDS, "25 µs"),
        (93.0, Unit.SECONDS, "93 s"),
        (0.9951, Unit.SHARE, "99.5 %"),
        (1234.0, Unit.TOKENS_PER_SECOND, "1.23 ktok/s"),
        (2.5e6, Unit.TOKENS, "2.5 Mtok"),
        (8.04, Unit.REQUESTS_PER_SECOND, "8.04 req/s"),
        (0.05, Unit.EVENTS_PER_SECOND, "0.05 /s"),
        (750.0, Unit.COUNT, "750"),
        (1.5, Unit.FACTOR, "1.5 x"),
        (12.0, Unit.PAGES_PER_SECOND, "12 pages/s"),
        (math.nan, Unit.COUNT, "-"),
    ],
)
def test_numbers_are_written_as_grafana_writes_them(value: float, unit: Unit, text: str) -> None:
    assert format_value(value, unit) == text


def test_series_have_a_value_for_each_moment_and_a_name() -> None:
    """Prometheus leaves out moments without data; a legend's labels are filled in."""
    panel = Panel("p", "P.", Unit.COUNT, (Target("x", "{{replica}} up"),))
    result = {"metric": {"replica": "e1"}, "values": [[START, "1"], [START + 2, "3"], [END, "NaN"]]}
    (series,) = source(result).series(panel)
    assert series.name == "e1 up"
    assert series.values[0] == 1 and series.values[2] == 3
    assert np.isnan(series.values[1]) and np.isnan(series.values[-1])


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_panel_is_drawn(dashboard: Dashboard, tmp_path: Path) -> None:
    labels = ("replica", "reason", "status", "tenant", "phase", "stage", "slo", "kind", "state", "outcome")
    values = [[START + n, str(0.5 + math.sin(n / 20) / 2)] for n in range(STEPS)]
    figure = draw(dashboard, source({"metric": dict.fromkeys(labels, "one"), "values": values}))
    shown = {text.get_text() for text in figure.texts}
    assert {panel.title for panel in dashboard.panels()} | {row.title for row in dashboard.rows} <= shown
    path = tmp_path / "page.png"
    figure.savefig(path, dpi=20)  # fewer dots of the same drawing
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("results", [[], [{"metric": {}, "values": [[START, "NaN"]]}]], ids=["nothing", "NaN"])
def test_panels_without_data_show_no_data(results: list[Mapping[str, object]]) -> None:
    figure = draw(DASHBOARDS[-1], source(*results))
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert said == ["No data"] * len(list(DASHBOARDS[-1].panels()))


def test_a_refused_query_is_an_error() -> None:
    refusing = httpx.MockTransport(lambda request: httpx.Response(400, json={"error": "parse error"}))
    broken = PrometheusView(httpx.Client(base_url="http://prometheus", transport=refusing), START, END, EVERYTHING)
    with pytest.raises(httpx.HTTPStatusError):
        draw(DASHBOARDS[0], broken)
