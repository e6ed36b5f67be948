"""Renders a `TopView` on a terminal with one line per row, with or without colours.

raydix  http://127.0.0.1:8000  healthy 2/2  14:38:22  over 1.0 s
admission: 3 waiting (1.2K tokens)  errors: 1 (404)  rejected: 2 (queue_full)  ...

model     status  up  req/s  gen/s   hit  TTFT50  TTFT99  ITL50  ITL99
replica   state  run wait  KV ####====......  used  prefill decode  hit  pre beat
decision  reason  replica ...
hidden: ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from deployments.cli.printable import printable
from deployments.cli.top_state import DecisionRow, ModelRow, ReplicaRow, ServiceSummary, TopView
from deployments.cli.units import count_text, seconds_text

RowT = TypeVar("RowT")

COLOURS = {
    "healthy": "green", "up": "green", "degraded": "yellow", "draining": "yellow", "starting": "yellow",
    "stopping": "yellow", "unhealthy": "bold red", "lost": "bold red", "gone": "bold red",
}  # fmt: skip
LEAST_BAR = 10
MOST_BAR = 40
_FIXED_LINES = 8
"""Two lines of the head, and an empty one and a header for each of the three tables."""
_LEAST_DECISIONS = 3


@dataclass(frozen=True, slots=True)
class Outage:
    """The server does not answer."""

    since: float
    """Unix seconds."""
    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """One column of a table, shown if the terminal has at least `from_width` cells."""

    title: str
    width: int
    cell: Callable[[RowT], str | Text]
    from_width: int = 0
    justify: str = "right"


def _name(replica: str) -> str:
    """Return Serve's id without the deployment: "EngineReplica#1a2b3c4d" -> "1a2b3c4d"."""
    return replica.rpartition("#")[2] or replica


def _count(value: float | None) -> str:
    return "-" if value is None else count_text(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value).replace(" ", "")


def _age(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}s" if value < 100 else _seconds(value)


def _state(state: str | None) -> Text:
    return Text(printable(state or "-"), style=COLOURS.get(state or "", ""))


MODEL_COLUMNS: tuple[Column[ModelRow], ...] = (
    Column("status", 9, lambda m: _state(m.status), justify="left"),
    Column("up", 5, lambda m: f"{_count(m.replicas_up)}/{_count(m.replicas_expected)}"),
    Column("run", 5, lambda m: _count(m.running), 100),
    Column("wait", 5, lambda m: _count(m.waiting), 100),
    Column("req/s", 5, lambda m: _count(m.requests_per_s)),
    Column("prefill/s", 9, lambda m: _count(m.prefill_tokens_per_s), 100),
    Column("gen/s", 5, lambda m: _count(m.generated_tokens_per_s)),
    Column("hit", 4, lambda m: _share(m.hit_rate)),
    Column("TTFT50", 6, lambda m: _seconds(m.ttft_p50_s)),
    Column("TTFT99", 6, lambda m: _seconds(m.ttft_p99_s)),
    Column("ITL50", 6, lambda m: _seconds(m.itl_p50_s)),
    Column("ITL99", 6, lambda m: _seconds(m.itl_p99_s)),
)
VERSION_COLUMNS: tuple[Column[ModelRow], ...] = (
    Column("share", 5, lambda m: _share(m.session_share)),
    Column("rollout", 11, lambda m: printable(m.rollout or "-"), 110, "left"),
)
"""Shown where a model has versions."""
REPLICA_COLUMNS: tuple[Column[ReplicaRow], ...] = (
    Column("model", 14, lambda r: printable(r.model or "-"), 110, "left"),
    Column("state", 8, lambda r: _state(r.state), justify="left"),
    Column("run", 4, lambda r: _count(r.running)),
    Column("wait", 4, lambda r: _count(r.waiting)),
    Column("to prefill", 10, lambda r: _count(r.waiting_prefill_tokens), 110),
    Column("used", 4, lambda r: _share(_used(r))),
    Column("pages", 6, lambda r: _count(_pages(r)), 110),
    Column("pre/s", 5, lambda r: _count(r.prefill_tokens_per_s)),
    Column("dec/s", 5, lambda r: _count(r.decode_tokens_per_s)),
    Column("hit", 4, lambda r: _share(r.hit_rate)),
    Column("evict/s", 7, lambda r: _count(r.evicted_pages_per_s), 110),
    Column("preempt", 7, lambda r: _count(r.preemptions)),
    Column("beat", 5, lambda r: _age(r.heartbeat_age_s)),
)
DECISION_COLUMNS: tuple[Column[DecisionRow], ...] = (
    Column("at", 8, lambda d: _clock(d.at_unix_s), justify="left"),
    Column("model", 14, lambda d: printable(d.model), 110, "left"),
    Column("reason", 14, lambda d: printable(d.reason), justify="left"),
    Column("prompt", 6, lambda d: _count(d.prompt_tokens)),
    Column("predicted", 9, lambda d: _count(d.predicted_cached_tokens)),
    Column("on host", 7, lambda d: _count(d.predicted_host_tokens), 110),
    Column("in files", 8, lambda d: _count(d.predicted_file_tokens), 120),
    Column("found", 6, lambda d: _count(d.found_cached_tokens)),
    Column("cost", 7, lambda d: _seconds(d.cost_s)),
    Column("request", 40, lambda d: printable(d.request_id), 110, "left"),
)


@dataclass(frozen=True, slots=True)
class Screen:
    """One frame of the console's width, with `fits_height` cut to its height."""

    url: str
    view: TopView | None
    outage: Outage | None = None
    fits_height: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield lines and tables, none of them wider than the console."""
        width, height = options.max_width, console.height if self.fits_height else 1 << 16
        overflow = "crop" if options.ascii_only else "ellipsis"
        blocks = self._blocks(width, height, options.ascii_only)
        left = height
        for block in blocks:
            num_lines = 1 if isinstance(block, Text) else block.row_count + 1
            left -= num_lines
            if left < 0:
                return
            if isinstance(block, Text):
                block.no_wrap, block.overflow = True, overflow  # type: ignore[assignment]
                block.truncate(width, overflow=overflow)  # type: ignore[arg-type]
            else:
                for column in block.columns:
                    column.overflow = overflow  # type: ignore[assignment]
            yield block

    def _blocks(self, width: int, height: int, is_ascii: bool) -> list[Text | Table]:
        view = self.view
        head = _head(self.url, view)
        if view is None:
            return [head, _outage(self.outage)] if self.outage is not None else [head]
        lines = [head, _outage(self.outage) if self.outage is not None else _service(view.service)]
        foot = [Text(f"hidden: {printable(f'{what} ({why})')}", style="dim") for what, why in view.hidden.items()]
        free = max(height - _FIXED_LINES - len(foot), 0)
        num_models = min(len(view.models), max(free // 4, 1))
        reserved = min(_LEAST_DECISIONS, len(view.decisions or ()))
        num_replicas = min(len(view.replicas), max(free - num_models - reserved, 1))
        num_decisions = max(free - num_models - num_replicas, 0)
        blocks: list[Text | Table] = [*lines, Text()]
        blocks += [_models(view.models, num_models, width), Text()]
        blocks += [_replicas(view.replicas, num_replicas, width, is_ascii)]
        if view.decisions is not None:
            blocks += [Text(), _decisions(view.decisions, num_decisions, width)]
        return [*blocks, *foot]


def _head(url: str, view: TopView | None) -> Text:
    head = Text.assemble(("raydix", "bold"), "  ", printable(url))
    if view is None:
        return head
    service = view.service
    head.append("  ").append_text(_state(service.status))
    head.append(f" {_count(service.replicas_up)}/{_count(service.replicas_expected)}  {_clock(view.at_unix_s)}  ")
    return head.append(f"over {view.interval_s:.1f} s" if view.interval_s is not None else "since start", "dim")


def _outage(outage: Outage) -> Text:
    since = f"No answer since {_clock(outage.since)} ({seconds_text(max(outage.now - outage.since, 0))})"
    return Text(f"{since}, trying again: {printable(outage.reason)}", style="bold red")


def _service(service: ServiceSummary) -> Text:
    tokens = _count(service.admission_waiting_tokens)
    parts = [f"admission: {_count(service.admission_waiting_requests)} wait ({tokens} tokens)"]
    parts.append("errors: " + _counts(service.errors, service.errors_by_status))
    parts.append("rejected: " + _counts(service.rejections, service.rejections_by_reason))
    for name in ("retries", "migrations", "disconnects"):
        if getattr(service, name):
            parts.append(f"{name}: {_count(getattr(service, name))}")
    if service.decisions_by_reason:
        parts.append("routed: " + _kinds(service.decisions_by_reason))
    return Text("  ".join(parts))


def _counts(total: float | None, kinds: Mapping[str, float]) -> str:
    return f"{_count(total)} ({_kinds(kinds)})" if kinds else _count(total)


def _kinds(kinds: Mapping[str, float]) -> str:
    return printable(", ".join(f"{_count(number)} {kind}" for kind, number in kinds.items()))


def _models(models: Sequence[ModelRow], shown: int, width: int) -> Table:
    of_versions = VERSION_COLUMNS if any(model.session_share is not None for model in models) else ()
    columns = [c for c in (*MODEL_COLUMNS, *of_versions) if c.from_width <= width]
    first: Column[ModelRow] = Column(
        _of("model", shown, len(models)), _left(columns, width, 30), lambda m: printable(m.model), 0, "left"
    )
    return _table([first, *columns], models[:shown])


def _replicas(replicas: Sequence[ReplicaRow], shown: int, width: int, is_ascii: bool) -> Table:
    columns = [c for c in REPLICA_COLUMNS if c.from_width <= width]
    first: Column[ReplicaRow] = Column(
        _of("replica", shown, len(replicas)),
        8 if width < 110 else 14,
        lambda r: printable(_name(r.replica)),
        0,
        "left",
    )
    size = max(_left([first, *columns], width, MOST_BAR), 0)
    glyphs = "#=." if is_ascii else "█▒░"
    title = f"KV {glyphs[0]} active {glyphs[1]} cached" if size >= 20 else f"KV {glyphs[0]}act {glyphs[1]}cached"
    bar: Column[ReplicaRow] = Column(title, size, lambda r: kv_bar(r, size, glyphs), 0, "left")
    where = next(i for i, column in enumerate(columns) if column.title == "used")
    return _table(
        [first, *columns[:where], *([bar] if size >= LEAST_BAR else []), *columns[where:]], replicas[:shown]
    )


def _decisions(decisions: Sequence[DecisionRow], shown: int, width: int) -> Table:
    columns = [c for c in DECISION_COLUMNS if c.from_width <= width]
    where: Column[DecisionRow] = Column("decided for", 14, lambda d: printable(_name(d.replica)), 0, "left")
    return _table([columns[0], where, *columns[1:]], decisions[:shown])


def kv_bar(replica: ReplicaRow, size: int, glyphs: str) -> Text:
    """Draw a replica's pages as `size` cells, with one glyph each for active, cached and free pages."""
    total = _pages(replica)
    if not total:
        return Text("-")
    active = round(size * (replica.kv_pages_active or 0.0) / total)
    held = round(size * ((replica.kv_pages_active or 0.0) + (replica.kv_pages_cached or 0.0)) / total)
    full = (replica.kv_pages_active or 0.0) / total > 0.9
    return Text.assemble(
        (glyphs[0] * active, "red" if full else "cyan"), (glyphs[1] * (held - active), "blue"),
        (glyphs[2] * (size - held), "dim"),
    )  # fmt: skip


def _pages(replica: ReplicaRow) -> float | None:
    states = [replica.kv_pages_free, replica.kv_pages_active, replica.kv_pages_cached]
    known = [max(state, 0.0) for state in states if state is not None]
    return sum(known) if known else None


def _used(replica: ReplicaRow) -> float | None:
    total = _pages(replica)
    return (replica.kv_pages_active or 0.0) / total if total else None


def _of(what: str, shown: int, number: int) -> str:
    return what if shown >= number else f"{what} {shown}/{number}"


def _left(columns: Sequence[Column[RowT]], width: int, most: int) -> int:
    """Return the cells that these columns, each followed by a gap, leave free, but at most `most`."""
    return min(width - sum(column.width + 1 for column in columns), most)


def _table(columns: Sequence[Column[RowT]], rows: Sequence[RowT]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold dim")
    for column in columns:
        table.add_column(column.title, width=column.width, no_wrap=True, justify=column.justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def _clock(at: float | None) -> str:
    try:
        return "-" if at is None else time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return "-"
