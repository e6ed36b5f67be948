"""The plot of time to first token over load, for docs/benchmarks.md. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from deployments.simulator.fleet.plots import HEADING, HIGHLIGHT, INK, PALE, QUIET, TICKS, colour_of
from deployments.simulator.fleet.result import Result


def draw_loads(path: Path, results: Sequence[Result], title: str, highlight: str = "cost") -> None:
    """Write a figure of TTFT p95 over load, a line per policy, named at its end."""
    figure = Figure(figsize=(8, 5), facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=QUIET)
    axes = figure.subplots()
    ends = []
    for policy in dict.fromkeys(result.policy for result in results):
        rows = sorted((r for r in results if r.policy == policy), key=lambda result: result.load)
        is_ours = policy == highlight
        loads, waits = [row.load for row in rows], [row.ttft_p95 for row in rows]
        width, size, alpha = (2.6, 6, 1.0) if is_ours else (1.3, 4, 0.7)
        colour = colour_of(rows[0], highlight)
        axes.plot(loads, waits, marker="o", color=colour, linewidth=width, markersize=size, alpha=alpha)
        ends.append((rows[-1].ttft_p95, rows[-1].load, policy))
    axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    for y, (_, load, policy) in zip(_apart([end[0] for end in sorted(ends)], 1.12), sorted(ends), strict=True):
        is_ours = policy == highlight
        axes.annotate(
            policy, (load, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9,
            color=HIGHLIGHT if is_ours else INK, fontweight="bold" if is_ours else "normal", annotation_clip=False,
        )  # fmt: skip
    ticks = [tick for tick in TICKS if lowest <= tick <= highest]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{tick:g} s" for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(sorted({result.load for result in results})))
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.set_title("Time to first token, p95, by offered load", **HEADING)
    axes.set_xlabel("offered prompt tokens over what the fleet can prefill", fontsize=9, color=INK)
    figure.savefig(path, dpi=130, format="png")


def _apart(values: Sequence[float], factor: float) -> list[float]:
    """Return sorted values, moved up where they are closer than `factor` to the one before."""
    moved: list[float] = []
    for value in values:
        moved.append(max(value, moved[-1] * factor) if moved else value)
    return moved
