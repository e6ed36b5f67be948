"""The model of a dashboard: rows of panels on a grid of 24 columns, converted to Grafana's JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

COLUMNS = 24
"""Width of Grafana's grid."""


class Unit(Enum):
    """Unit of a panel's numbers; the value is Grafana's name for it."""

    SECONDS = "s"
    SHARE = "percentunit"
    """A share from 0 to 1, shown as per cent."""
    COUNT = "short"
    BYTES = "bytes"
    REQUESTS_PER_SECOND = "reqps"
    EVENTS_PER_SECOND = "ops"
    TOKENS = "si:tok"
    TOKENS_PER_SECOND = "si:tok/s"
    PAGES_PER_SECOND = "suffix:pages/s"
    FACTOR = "suffix:x"


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel."""

    expr: str
    """PromQL, with Grafana's variables."""
    legend: str
    """A series' name; {{label}} stands for a label's value."""
    is_sparse: bool = False
    """Whether the query has no data until an event that may never occur in a healthy application."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value from which a panel shows a colour."""

    value: float
    color: Literal["green", "orange", "red"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph, or one big number."""

    title: str
    description: str
    """The content of the panel, which values are good, and where to look when they are not."""
    unit: Unit
    targets: tuple[Target, ...]
    width: int = 8
    """Width in columns; the grid has 24."""
    kind: Literal["timeseries", "stat"] = "timeseries"
    is_stacked: bool = False
    base: Literal["green", "orange", "red"] = "green"
    """The colour below all thresholds."""
    thresholds: tuple[Threshold, ...] = ()
    """Ascending."""
    max: float | None = None
    """End of the axis."""
    soft_min: float = 0.0
    """Start of the axis, unless a value is smaller."""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under a heading, from left to right, in lines that fill the grid."""

    title: str
    panels: tuple[Panel, ...]
    height: int = 8
    """Height of each line, in Grafana's grid units of 30 pixels."""

    def __post_init__(self) -> None:
        self.positions()

    def positions(self) -> list[tuple[Panel, int, int]]:
        """Return each panel, its column and its line's offset. Raises ValueError for a ragged line."""
        placed, column, line = [], 0, 0
        for panel in self.panels:
            placed.append((panel, column, line))
            column += panel.width
            if column > COLUMNS:
                raise ValueError(f"row {self.title!r}: {panel.title!r} ends in column {column} of {COLUMNS}")
            if column == COLUMNS:
                column, line = 0, line + self.height
        if column:
            raise ValueError(f"row {self.title!r}: its last line ends in column {column} of {COLUMNS}")
        return placed


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard, for `$name` in its queries."""

    name: str
    label: str
    source: str
    """The query that lists the values, e.g. label_values(metric, label)."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page."""

    uid: str
    """Identity of the dashboard in every Grafana, which never changes."""
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[PanelRow, ...]

    def panels(self) -> Iterator[Panel]:
        """Yield all panels in reading order."""
        for row in self.rows:
            yield from row.panels
