"""The page Prometheus reads: complete, parseable, and its totals never run backwards."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from monitoring.hub import MAX_SNAPSHOT_BYTES, Hub
from monitoring.metric_table import METRICS, PREFIX
from monitoring.metrics import Metrics, Snapshot
from monitoring.page import CONTENT_TYPE
from tests.monitoring.support.metrics_pages import page_of, sum_of
from tests.support.examples import examples


def engine(replica: str, tokens: int, running: int = 0) -> Metrics:
    metrics = Metrics("demo", replica, "engine")
    metrics.inc("generation_tokens_total", tokens)
    metrics.set("requests_running", running)
    for _ in range(tokens):
        metrics.observe("engine_step_seconds", 0.004, phase="decode")
    return metrics


def test_every_metric_is_on_the_page_with_its_help() -> None:
    hub = Hub()
    families = {f.name: f for f in text_string_to_metric_families(hub.render(0.0).decode())}
    for metric in METRICS:
        family = families[PREFIX + metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_an_ingress_that_serves_two_models_is_one_process_with_two_names() -> None:
    hub = Hub()
    for model, count in (("a", 2), ("b", 5)):
        metrics = Metrics(model, "i1", "ingress")
        metrics.inc("stream_disconnects_total", count)
        assert hub.push(f"i1/{model}", metrics.snapshot(), 0.0)
    samples = page_of(hub, 1.0)
    assert sum_of(samples, "metrics_processes") == 1
    assert [sum_of(samples, "stream_disconnects_total", model_name=model) for model in "ab"] == [2, 5]


def test_replicas_are_labelled_and_histograms_summed() -> None:
    hub = Hub()
    hub.push("a", engine("r1", 3, running=1).snapshot(), 0.0)
    hub.push("b", engine("r2", 4, running=2).snapshot(), 0.0)
    samples = page_of(hub, 1.0)
    assert sum_of(samples, "generation_tokens_total", replica="r1", model_name="demo") == 3
    assert sum_of(samples, "generation_tokens_total", replica="r2") == 4
    assert sum_of(samples, "requests_running", replica="r2") == 2
    assert sum_of(samples, "engine_step_seconds_count", phase="decode") == 7
    assert sum_of(samples, "engine_step_seconds_bucket", phase="decode", le="0.005") == 7
    assert sum_of(samples, "engine_step_seconds_bucket", phase="decode", le="0.003") == 0
    assert sum_of(samples, "engine_step_seconds_sum", phase="decode") == pytest.approx(0.028)
    assert sum_of(samples, "metrics_processes") == 2


def test_a_restart_continues_the_totals() -> None:
    hub = Hub()
    hub.push("a", engine("r1", 5).snapshot(), 0.0)
    hub.push("a", engine("r1", 2).snapshot(), 1.0)
    assert sum_of(page_of(hub, 1.0), "generation_tokens_total", replica="r1") == 7
    hub.push("a again", engine("r1", 1).snapshot(), 2.0)
    samples = page_of(hub, 2.0)
    assert sum_of(samples, "generation_tokens_total", replica="r1") == 8
    assert sum_of(samples, "engine_step_seconds_count", phase="decode") == 8


def test_a_silent_process_loses_its_gauges_but_not_its_totals() -> None:
    hub = Hub(gauge_ttl=10)
    metrics = engine("r1", 5, running=3)
    hub.push("a", metrics.snapshot(), 0.0)
    assert sum_of(page_of(hub, 10.0), "requests_running") == 3
    silent = page_of(hub, 10.5)
    assert sum_of(silent, "requests_running") is None
    assert sum_of(silent, "generation_tokens_total", replica="r1") == 5
    assert sum_of(silent, "metrics_processes") == 0
    hub.push("a", metrics.snapshot(), 20.0)
    assert sum_of(page_of(hub, 20.0), "requests_running") == 3


def test_after_a_restart_the_new_process_sets_the_gauges() -> None:
    hub = Hub()
    hub.push("old", engine("r1", 5, running=3).snapshot(), 0.0)
    hub.push("new", engine("r1", 0, running=1).snapshot(), 1.0)
    assert sum_of(page_of(hub, 1.0), "requests_running", replica="r1") == 1


def test_a_replica_gone_for_good_gives_up_its_label_and_keeps_its_counts() -> None:
    hub = Hub(gone_after=100)
    hub.push("a", engine("r1", 5).snapshot(), 0.0)
    survivor = engine("r2", 1)
    for now in (0.0, 200.0):
        hub.push("b", survivor.snapshot(), now)
    samples = page_of(hub, 200.0)
    assert sum_of(samples, "generation_tokens_total", replica="r1") is None
    assert sum_of(samples, "generation_tokens_total", replica="gone") == 5
    assert sum_of(samples, "generation_tokens_total", replica="r2") == 1
    assert sum_of(samples, "engine_step_seconds_count", phase="decode") == 6


def test_a_process_that_comes_back_is_not_counted_twice() -> None:
    hub = Hub(gone_after=100)
    metrics = engine("r1", 5)
    hub.push("a", metrics.snapshot(), 0.0)
    page_of(hub, 200.0)
    metrics.inc("generation_tokens_total", 2)
    hub.push("a", metrics.snapshot(), 201.0)
    samples = page_of(hub, 201.0)
    assert sum_of(samples, "generation_tokens_total", replica="gone") == 5
    assert sum_of(samples, "generation_tokens_total", replica="r1") == 2
    samples = page_of(hub, 400.0)
    assert sum_of(samples, "generation_tokens_total") == 7


def test_replicas_that_come_and_go_leave_no_series_behind() -> None:
    hub = Hub(gone_after=1)
    for i in range(3000):
        hub.push(f"p{i}", engine(f"r{i}", 1).snapshot(), i * 2.0)
        if i % 500 == 0:
            page_of(hub, i * 2.0)
    samples = page_of(hub, 10_000.0)
    assert sum_of(samples, "generation_tokens_total") == 3000
    assert {dict(series).get("replica") for _, series in samples} == {None, "gone", "hub"}


def malformed() -> dict[str, bytes]:
    good = msgspec.msgpack.decode(engine("r1", 1).snapshot())
    return {
        "not msgpack": b"\xc1nonsense",
        "empty": b"",
        "another type": msgspec.msgpack.encode([1, 2, 3]),
        "an older version": msgspec.msgpack.encode({**good, "version": 0}),
        "too few labels": msgspec.msgpack.encode({**good, "values": {"kv_pages": [[[], 1.0]]}}),
        "not finite": msgspec.msgpack.encode({**good, "values": {"requests_running": [[[], float("inf")]]}}),
        "a counter below zero": msgspec.msgpack.encode(
            {**good, "values": {"generation_tokens_total": [[[], -1.0]]}}
        ),
        "too few buckets": msgspec.msgpack.encode(
            {**good, "histograms": {"request_duration_seconds": [[[], [[1, 2], 0.5]]]}}
        ),
    }


@pytest.mark.parametrize("name", malformed())
def test_malformed_snapshots_are_dropped_and_counted(name: str) -> None:
    hub = Hub()
    assert not hub.push("x", malformed()[name], 0.0)
    samples = page_of(hub, 0.0)
    assert sum_of(samples, "metrics_snapshots_dropped_total", reason="malformed") == 1
    assert sum_of(samples, "metrics_processes") == 0


def test_oversized_and_late_snapshots_are_dropped_too() -> None:
    hub, metrics = Hub(), engine("r1", 1)
    early = metrics.snapshot()
    metrics.inc("generation_tokens_total")
    assert hub.push("a", metrics.snapshot(), 0.0)
    assert not hub.push("a", early, 1.0)
    assert not hub.push("b", b"\x00" * (MAX_SNAPSHOT_BYTES + 1), 1.0)
    samples = page_of(hub, 1.0)
    assert sum_of(samples, "generation_tokens_total") == 2
    assert sum_of(samples, "metrics_snapshots_dropped_total") == 2


@pytest.mark.parametrize("num_keepers", [0, 1])
def test_only_so_many_processes_are_kept(monkeypatch: pytest.MonkeyPatch, num_keepers: int) -> None:
    """Those that are known are heard on, also while a new hub asks what was counted before it."""
    monkeypatch.setattr("monitoring.hub.MAX_PROCESSES", 2)
    hub = Hub(num_keepers=num_keepers)
    first = engine("r0", 1)
    assert hub.push("r0", first.snapshot(), 0.0) and hub.push("r1", engine("r1", 1).snapshot(), 0.0)
    for number in range(2, 10):
        assert not hub.push(f"r{number}", engine(f"r{number}", 1).snapshot(), 0.0)
    first.inc("generation_tokens_total", 4)
    assert hub.push("r0", first.snapshot(), 1.0)
    samples = page_of(hub, 60.0)
    assert sum_of(samples, "generation_tokens_total") == 6
    assert sum_of(samples, "metrics_snapshots_dropped_total", reason="too_many") == 8


def test_metrics_of_a_newer_version_are_passed_over() -> None:
    snapshot = msgspec.msgpack.decode(engine("r1", 4).snapshot(), type=Snapshot)
    snapshot.values["invented_later_total"] = [(("x", "y"), 1.0)]
    later = {**msgspec.to_builtins(snapshot), "version": 2, "invented_later": [1]}
    hub = Hub()
    assert hub.push("a", msgspec.msgpack.encode(later), 0.0)
    assert sum_of(page_of(hub, 0.0), "generation_tokens_total", replica="r1") == 4


def test_label_values_are_escaped() -> None:
    metrics = Metrics('mo"del\n\\', "r1", "engine")
    hub = Hub()
    hub.push("a", metrics.snapshot(), 0.0)
    assert sum_of(page_of(hub, 0.0), "requests_running", model_name='mo"del\n\\') == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["count", "push", "restart", "wait"]), st.integers(0, 2), st.integers(1, 5)),
    max_size=40,
)


@settings(max_examples=examples(20), deadline=None)
@given(STEPS)
def test_totals_never_run_backwards_and_lose_nothing(steps: list[tuple[str, int, int]]) -> None:
    hub, now, pushed = Hub(gone_after=10), 0.0, 0
    metrics = [engine(f"r{i}", 0) for i in range(3)]
    unpushed, last = [0, 0, 0], 0.0
    for step, i, amount in steps:
        if step == "count":
            metrics[i].inc("generation_tokens_total", amount)
            unpushed[i] += amount
        elif step == "push":
            assert hub.push(f"p{i}", metrics[i].snapshot(), now)
            pushed, unpushed[i] = pushed + unpushed[i], 0
        elif step == "restart":
            metrics[i], unpushed[i] = engine(f"r{i}", 0), 0
        else:
            now += amount * 3
        total = sum_of(page_of(hub, now), "generation_tokens_total") or 0.0
        assert total == pushed >= last
        last = total
