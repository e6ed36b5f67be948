"""The hub: the latest values of every process, summed into one page for Prometheus.

process ──snapshot, each second or two──▶ Hub.push ──▶ { process: latest snapshot }
                                                       + the totals of ended processes
                                          Hub.render ◀── one page, the same at every ingress

Totals never decrease: a process's counts stay in the sum when it restarts (a new epoch under the
same label), when it is gone, and when the hub itself is replaced (`monitoring.checkpoint`). The totals of a
replica that is gone for good move to replica="gone", so labels do not accumulate as replicas come and go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from monitoring.checkpoint import VERSION, Checkpoint, Handover, Kept, KeptProcess, Stamp, decode, encode
from monitoring.metric_table import BY_NAME, Key
from monitoring.metrics import Metrics, Snapshot
from monitoring.page import Mirror, render_page
from monitoring.snapshots import read_snapshot
from monitoring.totals import Owner, Totals

GAUGE_TTL_S = 10.0
"""Seconds of silence after which a process's gauges are not shown: they may no longer be true."""
GONE_AFTER_S = 600.0
"""Seconds of silence after which a process counts as gone."""
PATIENCE_S = 10.0
"""Longest time that a new hub waits for the processes that may hold its predecessor's checkpoint."""
MAX_SNAPSHOT_BYTES = 1 << 20
MAX_PROCESSES = 8192
"""Processes that the hub remembers; reports of further ones are dropped and counted."""
MAX_REMEMBERED = 64
"""Most processes that count as gone whose last snapshots are kept, in case they return."""


class NotReady(Exception):
    """Raised while a new hub still waits for the processes that may hold its predecessor's checkpoint."""


@dataclass(slots=True)
class _ProcessReport:
    """A process's last report."""

    snapshot: Snapshot
    data: bytes
    """The snapshot as it came."""
    seen: float | None
    """Time of the report; None if it went to another hub."""

    @property
    def owner(self) -> Owner:
        return (self.snapshot.model_name, self.snapshot.replica)

    def is_recent(self, now: float, ttl: float) -> bool:
        return self.seen is not None and now - self.seen <= ttl


class Hub:
    """Collects snapshots and renders them. Time is an argument, and nothing runs by itself.

    Not thread-safe.
    """

    def __init__(
        self,
        gauge_ttl: float = GAUGE_TTL_S,
        gone_after: float = GONE_AFTER_S,
        *,
        num_keepers: int = 0,
        patience: float = PATIENCE_S,
        born: float = 0.0,
        generation: int = 1,
        mirrors: Sequence[Mirror] = (),
    ) -> None:
        """`num_keepers` processes keep checkpoints. `generation` is larger than that of any hub before.

        `born` is now, on the clock of all other times.
        """
        self._gauge_ttl, self._gone_after, self._born = gauge_ttl, gone_after, born
        self._mirrors = mirrors
        self._keeps = num_keepers > 0
        self._handover = Handover(num_keepers, patience, born) if self._keeps else None
        self._early: dict[tuple[str, str], _ProcessReport] = {}  # (process, epoch) -> report, during the handover
        self._processes: dict[str, _ProcessReport] = {}
        self._ended = Totals()
        self._gone: OrderedDict[str, _ProcessReport] = OrderedDict()
        self.own = Metrics("", "hub", "hub")
        """The metrics of the hub's own process."""
        self._stamp: Stamp = (generation, 0)
        self._checkpoint: Kept | None = None  # checkpoint of the last page

    # --- reports of processes ------------------------------------------------------------------------------

    def push(self, process: str, snapshot: bytes, now: float) -> bool:
        """Store a process's `Metrics.snapshot()`. Return False, and count it, when it could not be used."""
        if len(snapshot) > MAX_SNAPSHOT_BYTES:
            return self._drop("too_large")
        try:
            report = _ProcessReport(read_snapshot(snapshot), snapshot, now)
        except ValueError:
            return self._drop("malformed")
        if self._is_ready(now):
            return self._take(process, report)
        key = (process, report.snapshot.epoch)
        before = self._early.get(key)
        if before is None and len(self._early) >= MAX_PROCESSES:
            return self._drop("too_many")
        if before is not None and report.snapshot.sequence <= before.snapshot.sequence:
            return self._drop("out_of_order")
        self._early[key] = report
        return True

    def _take(self, process: str, report: _ProcessReport) -> bool:
        news, known, gone = report.snapshot, self._processes.get(process), self._gone.get(process)
        before = known or gone
        if before is not None and news.moment <= before.snapshot.moment:
            return self._drop("out_of_order")
        if known is None and len(self._processes) >= MAX_PROCESSES:
            return self._drop("too_many")
        if known is not None and known.snapshot.epoch != news.epoch:
            self._ended.add(known.owner, known.snapshot)
        if gone is not None and gone.snapshot.epoch == news.epoch:
            # The process was not gone, and its totals, already moved to "gone", return with it.
            self._ended.add(report.owner, gone.snapshot, sign=-1)
        self._gone.pop(process, None)
        self._processes[process] = report
        return True

    def _drop(self, reason: str) -> bool:
        self.own.inc("metrics_snapshots_dropped_total", reason=reason)
        return False

    # --- the page ------------------------------------------------------------------------------------------

    def render(self, now: float) -> bytes:
        """Return all metrics in Prometheus' text format. Raises NotReady."""
        if not self._is_ready(now):
            raise NotReady
        self._retire(now)
        totals = self._ended.copy()
        gauges: dict[str, dict[Key, float]] = {}
        recent: set[str] = set()  # a process that serves several models sends a snapshot for each
        # Oldest first: where two processes have the same label, the later report decides gauges.
        for report in sorted(self._processes.values(), key=lambda report: report.seen or 0.0):
            totals.add(report.owner, report.snapshot)
            if report.is_recent(now, self._gauge_ttl):
                recent.add(report.snapshot.replica)
                _set_gauges(gauges, report.owner, report.snapshot)
        self.own.set("metrics_processes", len(recent))
        own = self.own.snapshot()
        totals.add(("", "hub"), read_snapshot(own))
        _set_gauges(gauges, ("", "hub"), read_snapshot(own))
        if self._keeps:
            self._checkpoint = self._make_checkpoint(own, now)
        return render_page(totals, gauges, self._mirrors)

    def totals_of(self, model_name: str, now: float) -> Totals:
        """Return the totals of one model. Raises NotReady."""
        if not self._is_ready(now):
            raise NotReady
        totals = self._ended.of_model(model_name)
        for report in self._processes.values():
            if report.snapshot.model_name == model_name:
                totals.add(report.owner, report.snapshot)
        return totals

    def has_engine(self, model_name: str, now: float) -> bool:
        """Whether an engine of this model reported recently that it runs."""
        return any(
            report.snapshot.model_name == model_name
            and report.is_recent(now, self._gauge_ttl)
            and any(value for _, value in report.snapshot.values.get("engine_up", ()))
            for report in self._processes.values()
        )

    def _retire(self, now: float) -> None:
        """Move the counts of processes that are gone for good to replica="gone"."""
        for name, report in list(self._processes.items()):
            if now - (self._born if report.seen is None else report.seen) > self._gone_after:
                del self._processes[name]
                self._ended.add(report.owner, report.snapshot)
                self._gone[name] = report
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)
        self._ended.retire({("", "hub"), *(report.owner for report in self._processes.values())})

    # --- the previous and the next hub ---------------------------------------------------------------------

    @property
    def checkpoint(self) -> Kept | None:
        """The state of the last page; None before the first page, and when no process keeps it."""
        return self._checkpoint

    def keep(self, keeper: str, held: Stamp | None, now: float) -> tuple[bool, Kept | None]:
        """Note which checkpoint a keeper holds, which it reports once every second or two.

        Returns whether it should `restore` it here, and a newer one to hold instead, if there is one.
        """
        if not self._is_ready(now):
            assert self._handover is not None
            return self._handover.wants(keeper, held), None
        return False, self._checkpoint if held is None or held < self._stamp else None

    def restore(self, keeper: str, checkpoint: bytes, now: float) -> None:
        """Restore a keeper's checkpoint. One that comes too late, or is not usable, is ignored."""
        if self._is_ready(now):
            return
        assert self._handover is not None
        try:
            self._handover.offer(keeper, decode(checkpoint))
        except ValueError:
            self._handover.wants(keeper, None)
            self._drop("malformed")

    def _is_ready(self, now: float) -> bool:
        if self._handover is not None and self._handover.is_over({name for name, _ in self._early}, now):
            best, self._handover = self._handover.best, None
            if best is not None:
                self._resume_from(best)
            for (process, _), report in self._early.items():
                self._take(process, report)
            self._early.clear()
        return self._handover is None

    def _resume_from(self, checkpoint: Checkpoint) -> None:
        self._stamp = (max(self._stamp[0], checkpoint.stamp[0] + 1), 0)
        self._ended = Totals.of(checkpoint.ended)
        self._ended.add(("", "hub"), read_snapshot(checkpoint.own))
        for name, kept in checkpoint.processes.items():
            self._processes[name] = _ProcessReport(read_snapshot(kept.snapshot), kept.snapshot, None)
        for name, data in checkpoint.gone.items():
            self._gone[name] = _ProcessReport(read_snapshot(data), data, None)

    def _make_checkpoint(self, own: bytes, now: float) -> Kept:
        self._stamp = (self._stamp[0], self._stamp[1] + 1)
        kept = {
            name: KeptProcess(report.data, report.is_recent(now, self._gauge_ttl))
            for name, report in self._processes.items()
        }
        gone = {name: report.data for name, report in self._gone.items()}
        return self._stamp, encode(Checkpoint(VERSION, self._stamp, self._ended.state(), kept, gone, own))


def _set_gauges(gauges: dict[str, dict[Key, float]], owner: Owner, snapshot: Snapshot) -> None:
    for name, series in snapshot.values.items():
        if name in BY_NAME and BY_NAME[name].kind == "gauge":
            gauges.setdefault(name, {}).update({(*owner, *key): value for key, value in series})
