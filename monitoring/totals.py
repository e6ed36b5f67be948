"""Sums of the values that processes report: counters by replica, histograms over all replicas.

Prometheus treats the smallest decrease as a restart, and a sum of floats may be slightly smaller in another order.
So all values are whole multiples of 2^-30: sums are exact in any order, and added values can be subtracted again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from monitoring.metric_table import BY_NAME, Key
from monitoring.metrics import Histogram, Snapshot

Owner = tuple[str, str]
"""Model name and replica: the labels of the process that counted."""
GONE = "gone"
_UNIT = 2**30
"""Parts of 1: nanoseconds, for seconds. A power of two, so that whole numbers stay exact."""


@dataclass(slots=True)
class Merged:
    """A histogram summed over processes."""

    counts: list[int]
    """By bucket, not cumulative."""
    parts: int
    """The sum of the observations, in parts of 1."""

    @property
    def sum(self) -> float:
        """The sum of the observations."""
        return self.parts / _UNIT


class TotalsState(msgspec.Struct):
    """Totals in transit. Large whole numbers are strings, because msgpack's end at 64 bits."""

    counters: dict[str, list[tuple[Key, str]]]
    histograms: dict[str, list[tuple[Key, list[int], str]]]


class Totals:
    """Counters and histograms by name and labels; snapshots are added to them, or subtracted again."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[Key, int]] = {}
        self._histograms: dict[str, dict[Key, Merged]] = {}

    def counters(self, name: str) -> Mapping[Key, float]:
        """Return a counter's values by (model name, replica, its own labels)."""
        return {key: parts / _UNIT for key, parts in self._counters.get(name, {}).items()}

    def histograms(self, name: str) -> Mapping[Key, Merged]:
        """Return a histogram's values by (model name, its own labels)."""
        return self._histograms.get(name, {})

    def add(self, owner: Owner, snapshot: Snapshot, sign: int = 1) -> None:
        """Add a snapshot of `owner`; sign=-1 subtracts it. Names that are not in the table are ignored."""
        for name, values in snapshot.values.items():
            if name in BY_NAME and BY_NAME[name].kind == "counter":
                counter = self._counters.setdefault(name, {})
                for key, value in values:
                    series = (*owner, *key)
                    counter[series] = counter.get(series, 0) + sign * int(value * _UNIT)
        for name, observed in snapshot.histograms.items():
            if name in BY_NAME and BY_NAME[name].kind == "histogram":
                for key, histogram in observed:
                    self._merge(name, (owner[0], *key), histogram, sign)

    def retire(self, live: Collection[Owner]) -> None:
        """Move the counts of all replicas except `live` to replica="gone"."""
        for counter in self._counters.values():
            for key in [key for key in counter if key[:2] not in live and key[1] != GONE]:
                heir = (key[0], GONE, *key[2:])
                counter[heir] = counter.get(heir, 0) + counter.pop(key)

    def copy(self) -> Totals:
        """Return an independent copy."""
        twin = Totals()
        twin._counters = {name: dict(counter) for name, counter in self._counters.items()}
        twin._histograms = {
            name: {key: Merged(list(merged.counts), merged.parts) for key, merged in histograms.items()}
            for name, histograms in self._histograms.items()
        }
        return twin

    def of_model(self, model_name: str) -> Totals:
        """Return an independent copy of one model's totals."""
        mine = Totals()
        for name, counter in self._counters.items():
            mine._counters[name] = {key: value for key, value in counter.items() if key[0] == model_name}
        for name, histograms in self._histograms.items():
            mine._histograms[name] = {
                key: Merged(list(merged.counts), merged.parts)
                for key, merged in histograms.items()
                if key[0] == model_name
            }
        return mine

    def state(self) -> TotalsState:
        """Return all of it in the form for transit."""
        return TotalsState(
            {name: [(k, str(v)) for k, v in counter.items()] for name, counter in self._counters.items()},
            {
                name: [(key, merged.counts, str(merged.parts)) for key, merged in histograms.items()]
                for name, histograms in self._histograms.items()
            },
        )

    @classmethod
    def of(cls, state: TotalsState) -> Totals:
        """Return the totals of a `state()`. Values of another version that do not fit the table are omitted."""
        totals = cls()
        for name, values in state.counters.items():
            metric = BY_NAME.get(name)
            if metric is not None and metric.kind == "counter":
                fitting = {key: int(parts) for key, parts in values if len(key) == len(metric.labels) + 2}
                totals._counters[name] = fitting
        for name, observed in state.histograms.items():
            metric = BY_NAME.get(name)
            if metric is not None and metric.kind == "histogram":
                sizes = len(metric.labels) + 1, len(metric.buckets) + 1
                totals._histograms[name] = {
                    key: Merged(counts, int(parts))
                    for key, counts, parts in observed
                    if (len(key), len(counts)) == sizes
                }
        return totals

    def _merge(self, name: str, key: Key, histogram: Histogram, sign: int) -> None:
        histograms = self._histograms.setdefault(name, {})
        parts = int(histogram.sum * _UNIT)
        mine = histograms.get(key)
        if mine is None:
            mine = histograms[key] = Merged([0] * len(histogram.counts), 0)
        mine.counts = [a + sign * b for a, b in zip(mine.counts, histogram.counts, strict=True)]
        mine.parts += sign * parts
