"""Reads /metrics pages as numbers, and computes the changes between two of them.

Values are summed over all labels that a query does not name, so a page with additional labels gives the same
results. NaN and infinite values are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from monitoring.metric_table import PREFIX
from monitoring.totals import GONE

Labels = frozenset[tuple[str, str]]
Samples = Mapping[Labels, float]
"""The values of one metric, by labels."""
LARGEST = 1e100
"""Larger values are ignored: they are no measurements, and their sums might overflow."""


class MetricsPage:
    """One page. Metrics are named without their prefix. Immutable."""

    def __init__(self, samples: Mapping[str, Samples], is_raydix: bool = True) -> None:
        self._samples = samples
        self.is_raydix = is_raydix
        """Whether any metric on the page is one of Raydix's."""

    @classmethod
    def parse(cls, text: str) -> MetricsPage:
        """Read Prometheus' text format. Raises ValueError where the text is malformed."""
        samples: dict[str, dict[Labels, float]] = {}
        is_raydix = False
        for family in text_string_to_metric_families(text):
            is_raydix |= family.name.startswith(PREFIX)
            name = f"{family.name}_total" if family.type == "counter" else family.name
            samples.setdefault(name.removeprefix(PREFIX), {})
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and abs(sample.value) <= LARGEST:  # not NaN
                    series = samples.setdefault(sample.name.removeprefix(PREFIX), {})
                    series[frozenset(sample.labels.items())] = sample.value
        return cls(samples, is_raydix)

    def series(self, name: str, **labels: str) -> Samples:
        """Return the samples of a metric whose labels include these."""
        wanted = labels.items()
        return {key: value for key, value in self._samples.get(name, {}).items() if wanted <= key}

    def has(self, name: str) -> bool:
        """Whether the page names the metric, even if it has no samples yet."""
        return name in self._samples

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of these samples; None if there are none."""
        values = self.series(name, **labels).values()
        return sum(values) if values else None

    def values(self, name: str, label: str) -> set[str]:
        """Return the values of a label in a metric's samples."""
        return {value for key in self._samples.get(name, {}) for known, value in key if known == label}


@dataclass(frozen=True, slots=True)
class Interval:
    """The changes between two pages, or since the processes started if there is no earlier page."""

    before: MetricsPage | None
    after: MetricsPage
    seconds: float | None
    """Seconds between the pages; None without an earlier page, because no page says when the processes started."""

    def increase(self, name: str, **labels: str) -> float | None:
        """Return the growth of a counter; None when the page lacks the metric, or samples with these labels.

        A sample that fell was reset. Samples that appeared or vanished count together with those of "gone"
        replicas: the totals of a replica move there when it is given up, and back if it returns.
        """
        after = self.after.series(name, **labels)
        if not after and (labels or not self.after.has(name)):
            return None
        before = self.before.series(name, **labels) if self.before is not None else {}
        stayed = {key for key in after.keys() & before.keys() if ("replica", GONE) not in key}
        risen = sum(_risen(before[key], after[key]) for key in stayed)
        moved = _sum_without(after, stayed) - _sum_without(before, stayed)
        return risen + max(moved, 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the increase per second."""
        increase = self.increase(name, **labels)
        return increase / self.seconds if increase is not None and self.seconds else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the increase for each value of a label, without those that did not rise, largest first."""
        found = {value: self.increase(name, **{label: value}) or 0.0 for value in self.after.values(name, label)}
        return dict(sorted(((v, n) for v, n in found.items() if n > 0), key=lambda item: (-item[1], item[0])))

    def ratio(self, part: str, whole: str, **labels: str) -> float | None:
        """Return one counter's increase as a share of another's; None when the other did not rise."""
        of = self.increase(whole, **labels)
        return min((self.increase(part, **labels) or 0.0) / of, 1.0) if of else None

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Return a histogram's q-quantile, see `quantile_of`."""
        return quantile_of(self._bucket_counts(name, labels), q)

    def _bucket_counts(self, name: str, labels: Mapping[str, str]) -> dict[float, float]:
        """Return new observations up to each bound, summed over all matching histograms."""
        counts: dict[float, float] = {}
        before = _histograms(self.before, name, labels) if self.before is not None else {}
        for key, buckets in _histograms(self.after, name, labels).items():
            earlier = before.get(key, {})
            is_continued = all(earlier.get(bound, 0.0) <= count for bound, count in buckets.items())
            for bound, count in buckets.items():
                counts[bound] = counts.get(bound, 0.0) + count - (earlier.get(bound, 0.0) if is_continued else 0.0)
        return counts


def quantile_of(counts: Mapping[float, float], q: float) -> float | None:
    """Return the q-quantile, 0 to 1, linear within a bucket, of observations up to each bound; None without any.

    Observations above all bounds count as the highest bound, as in Prometheus' histogram_quantile.
    """
    bounds = sorted(counts)
    if not bounds or not (total := counts[bounds[-1]]) > 0:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank and counts[bound] > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = (low if math.isinf(bound) else bound), max(below, counts[bound])
    return low


def _risen(before: float, after: float) -> float:
    return after - before if after >= before else max(after, 0.0)


def _sum_without(samples: Samples, keys: set[Labels]) -> float:
    return sum(value for key, value in samples.items() if key not in keys)


def _histograms(page: MetricsPage, name: str, labels: Mapping[str, str]) -> dict[Labels, dict[float, float]]:
    """Return cumulative counts by upper bound, for each histogram."""
    found: dict[Labels, dict[float, float]] = {}
    for key, count in page.series(f"{name}_bucket", **labels).items():
        rest = frozenset(item for item in key if item[0] != "le")
        bound = _bound(dict(key).get("le", ""))
        if bound is not None:
            found.setdefault(rest, {})[bound] = count
    return found


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) else bound
