"""What the metrics of a version's processes say about its requests."""

from __future__ import annotations

import pytest

from deployments.hub.version_counts import VersionCounts
from monitoring.hub import Hub
from monitoring.metrics import Metrics

ENDED = {"endpoint": "completions", "streaming": "true"}
FAILED = {"endpoint": "completions", "error_type": "server_error"}


def counted(hub: Hub, model: str = "chat@v2", now: float = 1.0) -> VersionCounts:
    return VersionCounts.of(hub.totals_of(model, now), model)


def test_failures_are_answers_with_500_or_more_each_counted_once() -> None:
    hub, metrics, other = Hub(), Metrics("chat@v2", "i1"), Metrics("chat@v1", "i1")
    for reason in ("stop", "length", "abort"):
        metrics.inc("requests_total", 10, finish_reason=reason, **ENDED)
    metrics.inc("requests_total", 6, finish_reason="error", **ENDED)  # they count among the errors too
    metrics.inc("request_errors_total", 6, status="500", **FAILED)
    metrics.inc("request_errors_total", 4, status="503", **FAILED)  # refused before they were accepted
    metrics.inc("request_errors_total", 90, status="400", **FAILED)
    metrics.inc("request_errors_total", 90, status="429", **FAILED)
    other.inc("request_errors_total", 90, status="500", **FAILED)
    hub.push("i1/chat@v2", metrics.snapshot(), 0.0)
    hub.push("i1/chat@v1", other.snapshot(), 0.0)
    measured = counted(hub).measured()["error_rate"]
    assert (measured.value, measured.num_requests) == (0.25, 40)


def test_quantiles_are_of_the_requests_since_a_moment_and_of_all_processes() -> None:
    hub, first, second = Hub(), Metrics("chat@v2", "i1"), Metrics("chat@v2", "i2")
    first.observe("time_to_first_token_seconds", 100.0, 50)
    hub.push("i1", first.snapshot(), 0.0)
    earlier = counted(hub)
    first.observe("time_to_first_token_seconds", 0.15, 60)
    second.observe("time_to_first_token_seconds", 0.4, 40)
    second.observe("time_per_output_token_seconds", 0.04, 20)
    hub.push("i1", first.snapshot(), 1.0)
    hub.push("i2", second.snapshot(), 1.0)
    measured = counted(hub).since(earlier).measured()
    # Of 100 requests, 60 are in the bucket up to 0.2 s and 40 in that up to 0.5 s: the 95th is 35/40 through it.
    assert measured["ttft_p95"].value == pytest.approx(0.2 + 0.3 * 35 / 40)
    assert measured["ttft_p95"].num_requests == 100
    assert measured["tpot_p95"].value == pytest.approx(0.03 + 0.02 * 0.95)
    assert measured["tpot_p95"].num_requests == 20


def test_what_was_not_observed_has_no_value() -> None:
    measured = counted(Hub()).since(VersionCounts()).measured()
    assert {name: (each.value, each.num_requests) for name, each in measured.items()} == dict.fromkeys(
        ("error_rate", "ttft_p95", "tpot_p95"), (None, 0)
    )


def test_counts_of_a_process_that_is_replaced_stay() -> None:
    hub, metrics = Hub(gone_after=10.0), Metrics("chat@v2", "i1")
    metrics.inc("requests_total", 7, finish_reason="stop", **ENDED)
    metrics.observe("time_to_first_token_seconds", 0.1, 7)
    hub.push("i1", metrics.snapshot(), 0.0)
    before = counted(hub)
    hub.push("i1", Metrics("chat@v2", "i1").snapshot(), 1.0)
    assert counted(hub) == before
    hub.render(100.0)
    assert counted(hub, now=100.0) == before
