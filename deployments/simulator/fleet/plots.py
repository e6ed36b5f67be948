"""Plots of simulation results as PNG: hit rate and TTFT percentiles by policy and load. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator, PercentFormatter

from deployments.simulator.fleet.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, PALE = "#1f2430", "#8a90a0", "#d7dae2"
HIGHLIGHT, RIVAL = "#d1495b", "#5b7a99"
"""The colours of the policy in question, and of all others."""
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def draw(path: Path, results: Sequence[Result], pooled: float, title: str, highlight: str = "cost") -> None:
    """Write a figure with one row of panels per load: hit rate on the left, TTFT p50-p95-p99 on the right."""
    loads = sorted({result.load for result in results})
    most = max(sum(result.load == load for result in results) for load in loads)
    figure = Figure(figsize=(11, 1.5 + len(loads) * (0.9 + 0.3 * most)), facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=QUIET)
    figure.get_layout_engine().set(hspace=0.06, wspace=0.04)  # type: ignore[union-attr, call-arg]
    panels = figure.subplots(len(loads), 2, squeeze=False, gridspec_kw={"width_ratios": [1, 1.35]})
    waits = [w for r in results for w in (r.ttft_p50, r.ttft_p99) if w > 0 and not math.isnan(w)] or [1.0]
    for (left, right), load in zip(panels, loads, strict=True):
        rows = sorted((r for r in results if r.load == load), key=lambda result: -result.ttft_p95)
        _hit_rates(left, rows, pooled, highlight)
        left.set_title(f"Load {load:g}: prompt tokens found in the cache", **HEADING)
        _waits(right, rows, highlight, (min(waits) / 1.5, max(waits) * 1.5))
        right.set_title(f"Load {load:g}: time to first token, seconds", **HEADING)
    figure.savefig(path, dpi=130, format="png")


HEADING: dict[str, Any] = {"loc": "left", "fontsize": 11, "color": INK, "fontweight": "bold", "pad": 16}


def _hit_rates(axes: Axes, rows: Sequence[Result], pooled: float, highlight: str) -> None:
    """Draw bars with their values, and the bound on them."""
    _prepare(axes, rows, highlight)
    widest = max(pooled, *(row.hit_rate for row in rows)) * 1.06 + 0.001
    for position, row in enumerate(rows):
        axes.barh(position, row.hit_rate, height=0.62, color=colour_of(row, highlight))
        is_inside = row.hit_rate > widest / 4
        axes.annotate(
            f"{row.hit_rate:.1%}", (row.hit_rate, position), xytext=(-5 if is_inside else 5, 0), va="center",
            textcoords="offset points", ha="right" if is_inside else "left", fontsize=9,
            color="white" if is_inside else INK,
        )  # fmt: skip
    axes.axvline(pooled, color=INK, linewidth=1, linestyle=(0, (3, 2)))
    axes.annotate(
        f"one pooled cache {pooled:.1%}", (pooled, 1.0), xycoords=("data", "axes fraction"), ha="center",
        xytext=(0, 3), textcoords="offset points", fontsize=8.5, color=INK, annotation_clip=False,
    )  # fmt: skip
    axes.set_xlim(0, widest)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _waits(axes: Axes, rows: Sequence[Result], highlight: str, limits: tuple[float, float]) -> None:
    """Draw a line from p50 to p99 with p95 marked, on a logarithmic scale."""
    _prepare(axes, rows, highlight)
    for position, row in enumerate(rows):
        if math.isnan(row.ttft_p50):
            continue
        colour = colour_of(row, highlight)
        axes.plot([row.ttft_p50, row.ttft_p99], [position] * 2, color=colour, linewidth=2.2, alpha=0.45)
        axes.plot([row.ttft_p50, row.ttft_p99], [position] * 2, "o", color=colour, markersize=4)
        axes.plot([row.ttft_p95], [position], "o", color=colour, markersize=9)
        axes.annotate(
            f"{row.ttft_p95:.2g}", (row.ttft_p95, position), xytext=(0, 7), textcoords="offset points",
            ha="center", fontsize=8.5, color=INK, fontweight="bold" if row.policy == highlight else "normal",
        )  # fmt: skip
    best = rows[-1]
    for value, name in ((best.ttft_p50, "p50"), (best.ttft_p95, "p95"), (best.ttft_p99, "p99")):
        axes.annotate(
            name, (value, len(rows) - 1), xytext=(0, 19), textcoords="offset points", ha="center", fontsize=8.5,
            color=QUIET, annotation_clip=False,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    ticks = [tick for tick in TICKS if limits[0] <= tick <= limits[1]]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color=PALE, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def _prepare(axes: Axes, rows: Sequence[Result], highlight: str) -> None:
    """Put the policies at the side, and nothing else around the data."""
    axes.set_yticks(range(len(rows)), [row.policy for row in rows], fontsize=10)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colour_of(row, highlight) if row.policy == highlight else INK)
        label.set_fontweight("bold" if row.policy == highlight else "normal")
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.tick_params(length=0, labelsize=9, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALE)


def colour_of(row: Result, highlight: str) -> str:
    """Return the colour of a result's policy."""
    return HIGHLIGHT if row.policy == highlight else RIVAL
