"""Tables of scaling runs for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from deployments.simulator.scaling.result import ScalingResult

LEGEND = """\
met       share of requests whose first token came within the objective; p50, p95: time to first token, seconds
refused   requests that admission refused
hours     replica-hours, from the decision to start a replica until it has drained; most: the highest target"""

_COLUMNS: tuple[tuple[str, Callable[[ScalingResult], float], str], ...] = (
    ("met", lambda r: r.attainment, ".1%"),
    ("p50", lambda r: r.ttft_p50, ".2f"),
    ("p95", lambda r: r.ttft_p95, ".2f"),
    ("refused", lambda r: r.turned_away, ".1%"),
    ("hours", lambda r: r.replica_hours, ".2f"),
    ("most", lambda r: r.most, ",d"),
)


def scaling_table(title: str, results: Sequence[ScalingResult]) -> Table:
    """Return one row per routing policy and setting, in the order given."""
    out = Table(title=title, title_justify="left", title_style="bold")
    out.box, out.padding, out.show_edge = box.SIMPLE_HEAD, (0, 0), False
    out.add_column("setting")
    for heading, _, _ in _COLUMNS:
        out.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        out.add_row(result.setting, *(format(value_of(result), shape) for _, value_of, shape in _COLUMNS))
    return out
