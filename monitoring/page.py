"""Prometheus's page: totals and gauges in its text format, in the order of the table of definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from monitoring.metric_table import METRICS, PREFIX, Key, Metric
from monitoring.totals import Totals

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

MetricFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Gauges = Mapping[str, Mapping[Key, float]]
"""Values by (model name, replica, own labels), by name."""


Mirror = Callable[[Gauges], Sequence[GaugeMetricFamily]]
"""More families, made from the page's gauges."""


def render_page(totals: Totals, gauges: Gauges, mirrors: Sequence[Mirror] = ()) -> bytes:
    """Return all metrics in Prometheus' text format, version 0.0.4 (`CONTENT_TYPE`)."""
    registry = CollectorRegistry()
    families = [_family(metric, totals, gauges.get(metric.name, {})) for metric in METRICS]
    registry.register(_Page([*families, *(family for mirror in mirrors for family in mirror(gauges))]))
    return generate_latest(registry)


class _Page(Collector):
    """Families already collected, in the form that prometheus_client asks for."""

    def __init__(self, families: list[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> list[MetricFamily]:
        return self._families


def _family(metric: Metric, totals: Totals, gauges: Mapping[Key, float]) -> MetricFamily:
    name, labels = PREFIX + metric.name, ["model_name", "replica", *metric.labels]
    if metric.kind == "gauge":
        gauge = GaugeMetricFamily(name, metric.help, labels=labels)
        for key in sorted(gauges):
            gauge.add_metric(key, gauges[key])
        return gauge
    if metric.kind == "counter":
        counter = CounterMetricFamily(name, metric.help, labels=labels)
        for key, value in sorted(totals.counters(metric.name).items()):
            counter.add_metric(key, value)
        return counter
    histogram = HistogramMetricFamily(name, metric.help, labels=["model_name", *metric.labels])
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    for key, merged in sorted(totals.histograms(metric.name).items(), key=lambda item: item[0]):
        buckets = list(zip(bounds, accumulate(merged.counts), strict=True))
        histogram.add_metric(key, buckets, merged.sum)
    return histogram
