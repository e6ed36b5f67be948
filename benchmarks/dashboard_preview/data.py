"""The results of a panel's queries, as lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import numpy as np
from numpy.typing import NDArray

from monitoring.dashboards.model import Panel

STEPS = 240
"""Number of points of a line."""
EVERYTHING: Mapping[str, str] = {
    "job": ".*",
    "model": ".*",
    "replica": ".*",
    "tenant": ".*",
    "__rate_interval": "1m",
}
"""The values that Grafana gives its own variables before a user chooses any."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PanelLine:
    """One line: its name, and a value for each moment, NaN where there is none."""

    name: str
    values: Values


@dataclass(frozen=True, slots=True)
class PrometheusView:
    """A Prometheus server, and the time span to show."""

    client: httpx.Client
    start: float
    """End of the time span, in seconds since 1970."""
    end: float
    variables: Mapping[str, str]

    @property
    def times(self) -> Values:
        """Return the moments of every series."""
        return np.linspace(self.start, self.end, STEPS)

    def series(self, panel: Panel) -> list[PanelLine]:
        """Return the results of the panel's queries. Raises httpx.HTTPError when Prometheus refuses one."""
        step = (self.end - self.start) / (STEPS - 1)
        found = []
        for target in panel.targets:
            asked = {
                "query": with_variables(target.expr, self.variables),
                "start": str(self.start),
                "end": str(self.end + step / 2),
                "step": f"{step:.6f}",
            }
            answer = self.client.get("/api/v1/query_range", params=asked).raise_for_status().json()
            for result in answer["data"]["result"]:
                values = np.full(STEPS, np.nan)
                for moment, value in result["values"]:
                    values[min(STEPS - 1, round((moment - self.start) / step))] = float(value)
                found.append(PanelLine(_name(target.legend, result["metric"]), values))
        return found


def with_variables(expr: str, values: Mapping[str, str]) -> str:
    """Return an expression with Grafana's variables replaced. Raises KeyError for a variable without a value."""
    return _VARIABLE.sub(lambda found: values[found[1] or found[2]], expr)


def _name(legend: str, labels: Mapping[str, str]) -> str:
    """Return a legend's text with the labels' values filled in and replicas' ids shortened."""
    filled = re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)
    return filled if len(filled) <= 32 else f"{filled[:31]}…"
