"""The comparison as a picture: a row of bars for each workload, engines side by side. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.peers.process import RAYDIX

_SHOWN = ("offline", "shared prefix cold", "shared prefix warm", "mixed", "single", "prefill")
_COLOURS = ["#d95f02", "#7570b3", "#1b9e77", "#66a61e", "#999999"]


def draw(results: dict[str, Any], path: Path) -> None:
    """One row of panels for each model; bars are the best rounds, whiskers reach down to the worst."""
    figure = Figure(figsize=(2.6 * len(_SHOWN), 3.2 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), len(_SHOWN), squeeze=False)
    for row, (model, report) in zip(panels, results.items(), strict=True):
        engines = list(report["versions"])
        names = [RAYDIX, *(name for name in engines if name != RAYDIX)]
        for panel, workload in zip(row, _SHOWN, strict=True):
            found = report["workloads"].get(workload, {"engines": {}, "unit": ""})
            bests = [found["engines"].get(name, {}).get("best", 0) for name in names]
            worsts = [found["engines"].get(name, {}).get("worst", 0) for name in names]
            down = [best - worst for best, worst in zip(bests, worsts, strict=True)]
            bars = panel.bar(
                names, bests, color=_COLOURS, yerr=[down, [0] * len(down)], capsize=2, ecolor="#444444"
            )
            panel.bar_label(bars, fmt="{:.0f}", fontsize=7)
            panel.set_title(f"{workload}\n{found['unit']}", fontsize=9)
            panel.tick_params(axis="x", labelrotation=60, labelsize=8)
            panel.spines[["top", "right"]].set_visible(False)
        precision, threads = report["settings"]["precision"], report["settings"]["threads"]
        row[0].set_ylabel(f"{model}\n{precision}, {threads} threads")
    figure.savefig(path, dpi=110)
