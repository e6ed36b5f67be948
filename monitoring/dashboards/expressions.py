"""Build PromQL over Raydix's metrics. A name that is not in the table of metrics raises KeyError.

The replica "gone" holds the counts of replicas that ended. It jumps when one ends, so rates omit it.
"""

from __future__ import annotations

from monitoring.metric_table import BY_NAME, PREFIX
from monitoring.totals import GONE

WINDOW = "$__rate_interval"


class Expressions:
    """Expressions restricted to the choices in a dashboard's variables.

    `per_replica` restricts the engines' counters and gauges to the chosen replicas. Histograms are merged over
    replicas, and the ingresses' metrics belong to no replica.
    """

    def __init__(self, *, per_replica: bool = False) -> None:
        self._per_replica = per_replica

    def gauge(self, name: str, *by: str, how: str = "sum", **labels: str) -> str:
        """Return a gauge, summed (or otherwise merged) by labels."""
        return f"{how}{_by(by)}({self._series(name, **labels)})"

    def rate(self, name: str, *by: str, **labels: str) -> str:
        """Return a counter's growth per second."""
        return f"sum{_by(by)}(rate({self._series(name, **labels)}[{WINDOW}]))"

    def total(self, name: str, *by: str, **labels: str) -> str:
        """Return a counter's value, for counters that stop growing before the first request arrives."""
        return f"max{_by(by)}(max_over_time({self._series(name, **labels)}[{WINDOW}]))"

    def share(self, part: str, whole: str) -> str:
        """Return one expression over another that is grouped by the same labels."""
        return f"{part} / {whole}"

    def quantile(self, q: float, name: str, *by: str, **labels: str) -> str:
        """Return a histogram's quantile, interpolated within its bucket; NaN where nothing was observed."""
        buckets = f"rate({self._series(name, '_bucket', **labels)}[{WINDOW}])"
        return f"histogram_quantile({q}, sum{_by(('le', *by))}({buckets}))"

    def mean(self, name: str, *by: str, **labels: str) -> str:
        """Return a histogram's mean; NaN where nothing was observed."""
        total, count = (
            f"sum{_by(by)}(rate({self._series(name, suffix, **labels)}[{WINDOW}]))"
            for suffix in ("_sum", "_count")
        )
        return f"{total} / {count}"

    def _series(self, name: str, suffix: str = "", **labels: str) -> str:
        metric = BY_NAME[name]
        conditions = ['job=~"$job"', 'model_name=~"$model"']
        if self._per_replica and metric.part == "engine" and metric.kind != "histogram":
            conditions.append('replica=~"$replica"')
        if metric.kind == "counter":
            conditions.append(f'replica!="{GONE}"')
        for label, value in labels.items():
            conditions.append(f'{label}=~"{value}"' if "|" in value or "$" in value else f'{label}="{value}"')
        return f"{PREFIX}{name}{suffix}{{{', '.join(conditions)}}}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""
