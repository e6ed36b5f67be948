"""Tables of simulation results for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from deployments.simulator.fleet.result import Result

LEGEND = """\
hits    prompt tokens found in the cache; pooled: hits over those of one LRU cache of the fleet's size
host    prompt tokens held only by host memory; files, peers: those that came from there
p50..   percentiles of the time to first token, seconds
skew    prefill work of the busiest replica over the mean
regret  prompt tokens that the best known replica held and the chosen one did not; spills: requests with any"""

_Column = tuple[str, Callable[[Result], float], str, int]
"""Heading, value, format, and whether the largest (1) or the smallest (-1) value is the best, or neither (0)."""

_COLUMNS: tuple[_Column, ...] = (
    ("hits", lambda r: r.hit_rate, ".1%", 1),
    ("p50", lambda r: r.ttft_p50, ".2f", -1),
    ("p95", lambda r: r.ttft_p95, ".2f", -1),
    ("p99", lambda r: r.ttft_p99, ".2f", -1),
    ("skew", lambda r: r.prefill_skew, ".2f", -1),
    ("regret", lambda r: r.regret_share, ".1%", 0),
    ("spills", lambda r: r.num_spills, ",", 0),
)
_LOWER: tuple[_Column, ...] = (
    ("host", lambda r: r.host_share, ".1%", 0),
    ("files", lambda r: r.file_share, ".1%", 0),
    ("peers", lambda r: r.peer_share, ".1%", 0),
)
_AFTER_A_FAILURE: tuple[_Column, ...] = (
    ("moved", lambda r: r.num_moved, ",", 0),
    ("failed", lambda r: r.num_failed, ",", 0),
)


def tables(results: Sequence[Result], pooled: float) -> Iterator[Table]:
    """Yield one table per load, one row per policy, the lowest TTFT p95 first; the best of a column stands out."""
    has_failures = any(result.num_moved or result.num_failed for result in results)
    lower = [column for column in _LOWER if any(column[1](result) for result in results)]
    columns = (_COLUMNS[0], *lower, *_COLUMNS[1:], *(_AFTER_A_FAILURE if has_failures else ()))
    for load in sorted({result.load for result in results}):
        rows = sorted((r for r in results if r.load == load), key=lambda result: result.ttft_p95)
        busy = min(result.utilisation for result in rows), max(result.utilisation for result in rows)
        title = f"load {load:g}: prefill busy {busy[0]:.0%}" + (f" to {busy[1]:.0%}" if busy[1] > busy[0] else "")
        out = Table(title=title, title_justify="left", title_style="bold")
        out.box, out.padding, out.show_edge = box.SIMPLE_HEAD, (0, 0), False
        out.add_column("policy", no_wrap=True)
        for heading in (columns[0][0], "pooled", *(column[0] for column in columns[1:])):
            out.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            first, *others = (_cell(column, row, rows) for column in columns)
            share = f"{row.hit_rate / pooled:.0%}" if pooled else "-"
            out.add_row(row.policy, first, share, *others)
        yield out


def _cell(column: _Column, row: Result, rows: Sequence[Result]) -> Text:
    _, value_of, shape, best = column
    value = value_of(row)
    is_best = (
        best != 0 and len(rows) > 1 and value == max((value_of(other) for other in rows), key=lambda v: best * v)
    )
    return Text(format(value, shape), style="bold green" if is_best else "")
