"""What a dashboard is, before it is Grafana's JSON or a picture: rows of panels on a grid of 24 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

COLUMNS = 24
"""Width of Grafana's grid."""


class Unit(Enum):
    """What a panel's numbers are, by Grafana's name for it."""

    SECONDS = "s"
    SHARE = "percentunit"
    """0 to 1, shown as per cent."""
    COUNT = "short"
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
    """Whether it has no data until something happens that a healthy application may never see."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """From this value on, a panel shows this colour."""

    value: float
    color: Literal["green", "orange", "red"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph, or one big number."""

    title: str
    description: str
    """What it shows, what is good, and where to look when it is not."""
    unit: Unit
    targets: tuple[Target, ...]
    width: int = 8
    """In columns of 24."""
    kind: Literal["timeseries", "stat"] = "timeseries"
    is_stacked: bool = False
    base: Literal["green", "orange", "red"] = "green"
    """The colour below all thresholds."""
    thresholds: tuple[Threshold, ...] = ()
    """Ascending."""
    max: float | None = None
    """End of the axis."""
    soft_min: float = 0.0
    """Its beginning, unless a value is smaller."""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under a heading, from left to right, in lines that fill the grid."""

    title: str
    panels: tuple[Panel, ...]
    height: int = 8
    """Of each line, in Grafana's grid units of 30 pixels."""

    def __post_init__(self) -> None:
        self.positions()

    def positions(self) -> list[tuple[Panel, int, int]]:
        """Each panel with its column and its line's offset below the heading. ValueError for a ragged line."""
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
    """Ours for ever: by it a dashboard is found again."""
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[PanelRow, ...]

    def panels(self) -> Iterator[Panel]:
        """All panels, as one reads them."""
        for row in self.rows:
            yield from row.panels
