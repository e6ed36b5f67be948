"""Draw a dashboard's rows, panels, lines and legends on a page."""

from __future__ import annotations

from datetime import datetime

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from benchmarks.dashboard_preview.data import STEPS, PanelLine, PrometheusView
from benchmarks.dashboard_preview.units import format_value
from monitoring.dashboards.model import COLUMNS, Dashboard, Panel, Unit

COLUMN_PX, ROW_PX, GAP_PX, HEAD_PX, LINE_PX = 66.0, 31.0, 8.0, 60.0, 15.0
PAPER, CARD, EDGE, TEXT, FAINT = "#111217", "#181b1f", "#2c3036", "#d5d6dc", "#8e9199"
COLORS = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
# fmt: off
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#37872d", "#fade2a",
           "#c4162a")
# fmt: on

Box = tuple[float, float, float, float]
"""Left, top, width, height, in pixels from the top left of the page."""


def draw(dashboard: Dashboard, source: PrometheusView) -> Figure:
    """Draw the whole page."""
    height = sum(1 + max(below for _, _, below in row.positions()) + row.height for row in dashboard.rows)
    canvas = _Canvas(COLUMNS * COLUMN_PX, height * ROW_PX + HEAD_PX)
    canvas.text(GAP_PX, 26, dashboard.title, size=17, weight="bold")
    canvas.text(GAP_PX, 48, dashboard.description, size=10, color=FAINT)
    y = HEAD_PX
    for row in dashboard.rows:
        canvas.text(GAP_PX, y + ROW_PX * 0.72, row.title, size=12, weight="bold")
        y += ROW_PX
        for panel, x, below in row.positions():
            box = (x * COLUMN_PX, y + below * ROW_PX, panel.width * COLUMN_PX, row.height * ROW_PX)
            _draw_panel(canvas, box, panel, source)
        y += (below + row.height) * ROW_PX
    return canvas.figure


class _Canvas:
    """A figure whose coordinates are pixels from the top left."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 100, height / 100), facecolor=PAPER)

    def text(
        self, x: float, y: float, text: str, *, size: float, color: str = TEXT, weight: str = "normal"
    ) -> None:
        place = (x / self.width, 1 - y / self.height)
        self.figure.text(*place, text, fontsize=size * 0.72, color=color, weight=weight, va="baseline")

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        left, bottom = x / self.width, 1 - (y + height) / self.height
        return self.figure.add_axes((left, bottom, width / self.width, height / self.height))


def _draw_panel(canvas: _Canvas, box: Box, panel: Panel, source: PrometheusView) -> None:
    x, y, width, height = (
        box[0] + GAP_PX / 2,
        box[1] + GAP_PX / 2,
        box[2] - GAP_PX,
        box[3] - GAP_PX,
    )
    card = canvas.axes(x, y, width, height)
    card.set(facecolor=CARD, xticks=[], yticks=[])
    for spine in card.spines.values():
        spine.set(color=EDGE, linewidth=0.8)
    canvas.text(x + 10, y + 20, panel.title, size=12.5)
    series = source.series(panel)
    if not any(np.isfinite(one.values).any() for one in series):
        card.text(0.5, 0.45, "No data", color=FAINT, ha="center", va="center", fontsize=9)
    elif panel.kind == "stat":
        _draw_number(canvas, (x, y, width, height), panel, series[0], source)
    else:
        _draw_graph(canvas, (x, y, width, height), panel, series, source)


def _draw_number(canvas: _Canvas, box: Box, panel: Panel, one: PanelLine, source: PrometheusView) -> None:
    x, y, width, height = box
    finite = one.values[np.isfinite(one.values)]
    color = _color(panel, float(finite[-1]))
    axes = canvas.axes(x + 1, y + height * 0.68, width - 2, height * 0.31)
    axes.set_facecolor(CARD)
    axes.axis("off")
    axes.fill_between(source.times, np.nan_to_num(one.values), color=color, alpha=0.25, linewidth=0)
    axes.plot(source.times, one.values, color=color, linewidth=1)
    axes.set_xlim(source.start, source.end)
    axes.set_ylim(0, max(float(finite.max()) * 1.05, 1e-9))
    text = format_value(float(finite[-1]), panel.unit)
    canvas.figure.text(
        (x + width / 2) / canvas.width,
        1 - (y + height * 0.48) / canvas.height,
        text,
        ha="center",
        va="center",
        fontsize=21,
        color=color,
    )


def _draw_graph(canvas: _Canvas, box: Box, panel: Panel, series: list[PanelLine], source: PrometheusView) -> None:
    x, y, width, height = box
    lines = _legend(series, int(width / 7.4))
    left, above, below = 62.0, 32.0, 24.0 + LINE_PX * len(lines)
    axes = canvas.axes(x + left, y + above, width - left - 14, height - above - below)
    axes.set_facecolor(CARD)
    highest = _draw_lines(axes, panel, series, source)
    lowest = min(float(np.nanmin(one.values, initial=np.inf)) for one in series) if panel.soft_min else 0.0
    axes.set_ylim(min(panel.soft_min, lowest), panel.max or (highest * 1.12 if highest > 0 else 1.0))
    axes.set_xlim(source.start, source.end)
    for threshold in panel.thresholds:
        axes.axhline(threshold.value, color=COLORS[threshold.color], linewidth=1, linestyle=(0, (5, 4)))
    _style(axes, panel.unit, source)
    _write_legend(canvas, x + 12, y + height - LINE_PX * len(lines) + 6, lines)


def _draw_lines(axes: Axes, panel: Panel, series: list[PanelLine], source: PrometheusView) -> float:
    """Draw all series, stacked if the panel stacks them; returns the highest value."""
    highest, floor = 0.0, np.zeros(STEPS)
    for number, one in enumerate(series):
        color = PALETTE[number % len(PALETTE)]
        top = floor + np.nan_to_num(one.values) if panel.is_stacked else one.values
        # A series that adds nothing to a stack would only cover the line below it.
        line = np.where(top > floor, top, np.nan) if panel.is_stacked else top
        axes.plot(source.times, line, color=color, linewidth=1.1)
        alpha = 0.4 if panel.is_stacked else 0.08
        axes.fill_between(source.times, floor, top, where=np.isfinite(top), color=color, alpha=alpha, linewidth=0)
        highest = max(highest, float(np.nan_to_num(top).max()))
        floor = top if panel.is_stacked else floor
    return highest


def _style(axes: Axes, unit: Unit, source: PrometheusView) -> None:
    span = source.end - source.start

    def clock(at: float, _: int) -> str:
        is_in_corner = at - source.start < 0.04 * span  # where the other axis has its first number
        return "" if is_in_corner else f"{datetime.fromtimestamp(at):%H:%M}"

    axes.xaxis.set_major_locator(MultipleLocator(60.0 if span <= 600 else 300.0))
    axes.xaxis.set_major_formatter(FuncFormatter(clock))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value, unit)))
    axes.tick_params(colors=FAINT, labelsize=7, length=0)
    axes.grid(color=EDGE, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _color(panel: Panel, value: float) -> str:
    color = panel.base
    for threshold in panel.thresholds:
        color = threshold.color if value >= threshold.value else color
    return COLORS[color]


def _legend(series: list[PanelLine], chars: int, most_lines: int = 2) -> list[list[tuple[str, str]]]:
    """Return names and their colours in lines of at most `chars`; series that are always 0 come last."""
    numbered = sorted(enumerate(series), key=lambda item: not np.nan_to_num(item[1].values).any())
    lines: list[list[tuple[str, str]]] = [[]]
    used = 0
    for place, (number, one) in enumerate(numbered):
        needed = len(one.name) + 4
        rest = len(numbered) - place
        is_last_line = len(lines) == most_lines
        if used and used + needed + (10 if is_last_line and rest > 1 else 0) > chars:
            if is_last_line:
                lines[-1].append((f"+ {rest} more", ""))
                break
            lines.append([])
            used = 0
        lines[-1].append((one.name, PALETTE[number % len(PALETTE)]))
        used += needed
    return lines


def _write_legend(canvas: _Canvas, x: float, y: float, lines: list[list[tuple[str, str]]]) -> None:
    for line in lines:
        at = x
        for name, color in line:
            if color:
                canvas.text(at, y, "━", size=11, color=color)
            canvas.text(at + (14 if color else 0), y, name, size=10.5, color=FAINT)
            at += len(name) * 6.1 + 28
        y += LINE_PX
