"""Sums of what processes counted: counters by replica, histograms over all replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from monitoring.metrics import BY_NAME, Histogram, Key, Snapshot

Owner = tuple[str, str]
"""Model name and replica: the labels of whoever counted."""
GONE = "gone"


class Totals:
    """Counters and histograms by name and labels; snapshots are added to it, or taken away again."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[Key, float]] = {}
        self._histograms: dict[str, dict[Key, Histogram]] = {}

    def counters(self, name: str) -> Mapping[Key, float]:
        """A counter's values by (model name, replica, its own labels)."""
        return self._counters.get(name, {})

    def histograms(self, name: str) -> Mapping[Key, Histogram]:
        """A histogram's values by (model name, its own labels)."""
        return self._histograms.get(name, {})

    def add(self, owner: Owner, snapshot: Snapshot, sign: int = 1) -> None:
        """Add what `owner` counted; sign=-1 takes it away. Names that are not in the table are passed over."""
        for name, values in snapshot.values.items():
            if name in BY_NAME and BY_NAME[name].kind == "counter":
                counter = self._counters.setdefault(name, {})
                for key, value in values:
                    series = (*owner, *key)
                    counter[series] = counter.get(series, 0.0) + sign * value
        for name, observed in snapshot.histograms.items():
            if name in BY_NAME and BY_NAME[name].kind == "histogram":
                for key, histogram in observed:
                    self._merge(name, (owner[0], *key), histogram, sign)

    def retire(self, live: Collection[Owner]) -> None:
        """Give what is counted under other replicas than `live` to replica="gone"."""
        for counter in self._counters.values():
            for key in [key for key in counter if key[:2] not in live and key[1] != GONE]:
                heir = (key[0], GONE, *key[2:])
                counter[heir] = counter.get(heir, 0.0) + counter.pop(key)

    def copy(self) -> Totals:
        """An independent copy."""
        twin = Totals()
        twin._counters = {name: dict(counter) for name, counter in self._counters.items()}
        for name, histograms in self._histograms.items():
            for key, histogram in histograms.items():
                twin._merge(name, key, histogram, 1)
        return twin

    def _merge(self, name: str, key: Key, histogram: Histogram, sign: int) -> None:
        histograms = self._histograms.setdefault(name, {})
        mine = histograms.get(key) or Histogram([0] * len(histogram.counts))
        counts = [a + sign * b for a, b in zip(mine.counts, histogram.counts, strict=True)]
        histograms[key] = Histogram(counts, mine.sum + sign * histogram.sum)
