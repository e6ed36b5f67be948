"""One process's values: the table is sound, misuse is an error at once, numbers land where they belong."""

import re
import threading
from collections.abc import Callable

import pytest

from deployments.api.record.observation import ENDPOINTS
from monitoring.metric_table import BY_NAME, METRICS, Metric
from monitoring.metrics import MAX_SERIES, Metrics
from tests.support.metric_values import snapshot_of


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_definitions_follow_the_conventions_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(bucket|sum|count|created|info)$", metric.name) or metric.name == "build_info"
    assert metric.help.endswith((".", "runs.")) and ("seconds" in metric.name) == (metric.unit == "seconds")
    assert not {"model_name", "replica", "le"} & set(metric.labels)
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(METRICS)


def test_closed_labels_start_at_zero_and_only_in_their_part() -> None:
    engine, ingress, every = (Metrics("m", "r", part) for part in ("engine", "ingress", None))
    assert dict(snapshot_of(engine).values["requests_waiting"]) == {("capacity",): 0, ("deferred",): 0}
    assert "requests_total" not in snapshot_of(engine).values
    assert len(snapshot_of(ingress).values["requests_total"]) == len(set(ENDPOINTS.values())) * 2 * 5
    assert {*snapshot_of(every).values, *snapshot_of(every).histograms} >= {
        metric.name for metric in METRICS if metric.is_seeded and None not in metric.labels.values()
    }


def test_values_land_under_their_labels() -> None:
    metrics = Metrics("m", "r")
    metrics.inc("generation_tokens_total", 3)
    metrics.inc("generation_tokens_total")
    metrics.set("kv_pages", 7, state="cached", tier="device")
    metrics.inc("requests_total", finish_reason="stop", endpoint="completions", streaming="true")
    metrics.inc("request_errors_total", endpoint="other", status="404", error_type="not_found")
    values = {name: dict(series) for name, series in snapshot_of(metrics).values.items()}
    assert values["generation_tokens_total"] == {(): 4}
    assert values["kv_pages"]["cached", "device"] == 7
    assert values["requests_total"]["completions", "true", "stop"] == 1
    assert values["request_errors_total"] == {("other", "404", "not_found"): 1}


def test_series_that_were_looked_up_once_count_with_those_that_are_named_each_time() -> None:
    metrics = Metrics("m", "r")
    tokens = metrics.counter("generation_tokens_total")
    pages = metrics.gauge("kv_pages", state="free", tier="host")
    metrics.inc("generation_tokens_total", 3)
    tokens.inc()
    tokens.inc(2)
    pages.set(5)
    values = {name: dict(series) for name, series in snapshot_of(metrics).values.items()}
    assert values["generation_tokens_total"] == {(): 6} and values["kv_pages"]["free", "host"] == 5
    with pytest.raises(ValueError, match="is a counter, but was used as a gauge"):
        metrics.gauge("generation_tokens_total")


def test_a_bucket_includes_its_upper_bound() -> None:
    metrics = Metrics("m", "r")
    for value, count in ((1, 1), (2, 3), (3, 1), (5000, 2)):
        metrics.observe("engine_batch_requests", value, count, phase="decode")
    [decode] = [h for key, h in snapshot_of(metrics).histograms["engine_batch_requests"] if key == ("decode",)]
    assert decode.counts[:3] == [1, 3, 1] and decode.counts[-1] == 2
    assert sum(decode.counts) == 7 and decode.sum == 1 + 6 + 3 + 10000


def test_a_total_kept_elsewhere_never_lowers_a_counter() -> None:
    metrics = Metrics("m", "r")
    for total in (5, 9, 4):
        metrics.count_to("preemptions_total", total, mode="recompute")
    assert dict(snapshot_of(metrics).values["preemptions_total"]) == {("recompute",): 9, ("swap",): 0}


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda m: m.inc("no_such_total"), "no metric is named 'no_such_total'"),
        (
            lambda m: m.inc("kv_pages_capacity", tier="device"),
            "kv_pages_capacity is a gauge, but was used as a counter",
        ),
        (lambda m: m.set("kv_pages", 1, tier="device"), "'state' is missing"),
        (lambda m: m.set("kv_pages", 1, state="lost", tier="device"), "must be one of .*'free'.* got 'lost'"),
        (lambda m: m.set("kv_pages", 1, state="free", tier="device", user="x"), r"not \['user'\]"),
        (lambda m: m.inc("generation_tokens_total", -1), "can only grow"),
        (lambda m: m.inc("generation_tokens_total", float("nan")), "can only grow"),
        (lambda m: m.set("build_info", 1, version=3, attention="", device="", dtype=""), "a string"),
    ],
)
def test_misuse_is_an_error(use: Callable[[Metrics], None], expected: str) -> None:
    with pytest.raises((KeyError, ValueError), match=expected):
        use(Metrics("m", "r"))


def test_open_labels_do_not_grow_without_bound() -> None:
    metrics = Metrics("m", "r")
    for i in range(MAX_SERIES + 50):
        metrics.inc("request_errors_total", endpoint="other", status=str(i), error_type="x")
    series = dict(snapshot_of(metrics).values["request_errors_total"])
    assert len(series) == MAX_SERIES + 1
    assert series["other", "overflow", "overflow"] == 50


def test_threads_lose_no_counts() -> None:
    metrics = Metrics("m", "r")

    def count() -> None:
        for _ in range(2000):
            metrics.inc("generation_tokens_total")
            metrics.observe("inter_token_latency_seconds", 0.004)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = snapshot_of(metrics)
    assert dict(snapshot.values["generation_tokens_total"]) == {(): 8000}
    assert sum(snapshot.histograms["inter_token_latency_seconds"][0][1].counts) == 8000
