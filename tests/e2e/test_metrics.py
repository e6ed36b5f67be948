"""/metrics of the real application: complete, labelled by replica, and its counters rise by what was used."""

from __future__ import annotations

import httpx
import pytest

from monitoring.metric_table import METRICS, PREFIX
from tests.e2e.support.served_metrics import (
    Page,
    complete,
    read_until,
    read_when_settled,
    replicas_of,
    sum_of,
)

pytestmark = pytest.mark.e2e


def test_every_metric_of_the_table_is_served(base_url: str) -> None:
    text = httpx.get(f"{base_url}/metrics", timeout=60).text
    for metric in METRICS:
        assert f"# HELP {PREFIX}{metric.name} {metric.help}\n" in text
        assert f"# TYPE {PREFIX}{metric.name} {metric.kind}\n" in text


def test_both_replicas_are_labelled_and_account_for_their_pages(base_url: str) -> None:
    page = read_until(base_url, lambda page: len(replicas_of(page, "kv_pages")) == 2)
    engines = replicas_of(page, "kv_pages")
    assert len(engines) == 2
    for name in ("requests_running", "requests_waiting", "generation_tokens_total", "build_info"):
        assert engines <= replicas_of(page, name)
    for replica in engines:
        assert sum_of(page, "kv_pages", replica=replica) == sum_of(page, "kv_pages_capacity", replica=replica) > 0


def test_counters_rise_by_the_tokens_that_a_request_used(base_url: str) -> None:
    before = read_when_settled(base_url)
    first, second = complete(base_url, stream=False), complete(base_url, stream=False)
    prompt = first["prompt_tokens"] + second["prompt_tokens"]
    cached = first["cached_tokens"] + second["cached_tokens"]
    assert second["cached_tokens"] == second["prompt_tokens"] - 1, "the same prompt again is found but for a token"
    expected = {
        "requests_total": 2,
        "router_decisions_total": 2,
        "generation_tokens_total": 24,
        "prefix_cache_query_tokens_total": prompt,
        "prefix_cache_hit_tokens_total": cached,
        "request_duration_seconds_count": 2,
        "time_to_first_token_seconds_count": 2,
        "request_queue_seconds_count": 2,
        "request_prefill_seconds_count": 2,
        "request_decode_seconds_count": 2,
        "engine_batch_tokens_sum": prompt - cached + 22,
    }

    def rises(page: Page) -> dict[str, float]:
        return {name: sum_of(page, name) - sum_of(before, name) for name in expected}

    after = read_until(base_url, lambda page: rises(page) == expected)
    assert rises(after) == expected

    def rise(name: str, **labels: str) -> float:
        return sum_of(after, name, **labels) - sum_of(before, name, **labels)

    # A request's first tokens may come together: then there is no time between them.
    assert 0 < rise("inter_token_latency_seconds_count") <= 22
    assert rise("requests_total", endpoint="completions", streaming="false", finish_reason="length") == 2
    assert rise("prompt_tokens_total", source="device") == cached
    assert rise("prompt_tokens_total", source="computed") == prompt - cached
    for stage in ("schedule", "prepare", "forward", "sample", "output"):
        assert rise("engine_stage_seconds_total", stage=stage) > 0
    assert rise("engine_steps_total") == rise("engine_graph_replays_total", mode="eager") >= 24


def test_streamed_requests_and_errors_are_counted_apart(base_url: str) -> None:
    before = read_when_settled(base_url)
    complete(base_url, stream=True)
    assert httpx.post(f"{base_url}/v1/completions", json={"model": "no-such"}, timeout=60).is_client_error
    streamed = {"endpoint": "completions", "streaming": "true", "finish_reason": "length"}
    after = read_until(
        base_url,
        lambda page: (
            sum_of(page, "requests_total", **streamed) > sum_of(before, "requests_total", **streamed)
            and sum_of(page, "request_errors_total") > sum_of(before, "request_errors_total")
        ),
    )
    assert sum_of(after, "requests_total", **streamed) == sum_of(before, "requests_total", **streamed) + 1
    assert sum_of(after, "request_errors_total") == sum_of(before, "request_errors_total") + 1
    assert not any("no-such" in value for series in after["request_errors_total"] for _, value in series)


def test_latencies_lie_in_buckets_that_resolve_them(base_url: str) -> None:
    """Counts are cumulative and end in +Inf, and what a laptop takes does not fall into the first bucket."""
    complete(base_url, stream=False)
    page = read_until(base_url, lambda page: sum_of(page, "inter_token_latency_seconds_count") > 0)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_duration_seconds"):
        buckets = sorted((float(dict(series)["le"]), value) for series, value in page[f"{name}_bucket"].items())
        counts = [count for _, count in buckets]
        assert counts == sorted(counts) and buckets[-1] == (float("inf"), sum_of(page, f"{name}_count"))
        assert counts[0] < counts[-1]
