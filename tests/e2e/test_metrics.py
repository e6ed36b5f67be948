"""/metrics of the real application: complete, labelled by replica, and its counters rise by what was used."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitoring.metrics import METRICS, PREFIX
from tests.e2e.conftest import PATIENCE_S

pytestmark = pytest.mark.e2e

Labels = frozenset[tuple[str, str]]
Page = dict[str, dict[Labels, float]]
PUSH_S = 1.0
PROMPT = "What does itertools.chain do? And what is the difference to itertools.product, in one sentence?"


def read(base_url: str) -> Page:
    response = httpx.get(f"{base_url}/metrics", timeout=60).raise_for_status()
    assert response.headers["content-type"].startswith("text/plain; version=")
    page: Page = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            series = page.setdefault(sample.name.removeprefix(PREFIX), {})
            labels = frozenset(sample.labels.items())
            assert labels not in series, f"{sample.name} has a series twice"
            series[labels] = sample.value
    return page


def total(page: Page, name: str, **labels: str) -> float:
    """Sum over all series with these labels among theirs."""
    return sum(value for series, value in page.get(name, {}).items() if labels.items() <= set(series))


def replicas(page: Page, name: str) -> set[str]:
    return {dict(series)["replica"] for series in page.get(name, {})}


def eventually(base_url: str, holds: Callable[[Page], bool], seconds: float = PATIENCE_S) -> Page:
    """The page once `holds`, or the last one: processes report once a second."""
    deadline = time.monotonic() + seconds
    while not holds(page := read(base_url)) and time.monotonic() < deadline:
        time.sleep(PUSH_S / 4)
    return page


def settled(base_url: str) -> Page:
    """The page when earlier tests' requests have ended and been reported: two reports later it is the same."""
    eventually(base_url, lambda page: total(page, "requests_running") + total(page, "requests_waiting") == 0)
    page = read(base_url)
    while True:
        time.sleep(2 * PUSH_S)
        before, page = page, read(base_url)
        if all(page[name] == before[name] for name in ("requests_total", "generation_tokens_total")):
            return page


def complete(base_url: str, stream: bool) -> dict[str, int]:
    """One completion of 12 tokens; its usage."""
    model = httpx.get(f"{base_url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "stream": stream}
    response = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60).raise_for_status()
    if stream:
        assert response.text.rstrip().endswith("[DONE]")
        return {}
    usage = response.json()["usage"]
    return {**usage, "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}


def test_every_metric_of_the_table_is_served(base_url: str) -> None:
    text = httpx.get(f"{base_url}/metrics", timeout=60).text
    for metric in METRICS:
        assert f"# HELP {PREFIX}{metric.name} {metric.help}\n" in text
        assert f"# TYPE {PREFIX}{metric.name} {metric.kind}\n" in text


def test_both_replicas_are_labelled_and_account_for_their_pages(base_url: str) -> None:
    page = eventually(base_url, lambda page: len(replicas(page, "kv_pages")) == 2)
    engines = replicas(page, "kv_pages")
    assert len(engines) == 2
    for name in ("requests_running", "requests_waiting", "generation_tokens_total", "build_info"):
        assert engines <= replicas(page, name)
    for replica in engines:
        assert total(page, "kv_pages", replica=replica) == total(page, "kv_pages_capacity", replica=replica) > 0


def test_counters_rise_by_what_a_request_used(base_url: str) -> None:
    before = settled(base_url)
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
        return {name: total(page, name) - total(before, name) for name in expected}

    after = eventually(base_url, lambda page: rises(page) == expected)
    assert rises(after) == expected

    def rise(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    # A request's first tokens may come together: then there is no time between them.
    assert 0 < rise("inter_token_latency_seconds_count") <= 22
    assert rise("requests_total", endpoint="completions", streaming="false", finish_reason="length") == 2
    assert rise("prompt_tokens_total", source="device") == cached
    assert rise("prompt_tokens_total", source="computed") == prompt - cached
    for stage in ("schedule", "prepare", "forward", "sample", "output"):
        assert rise("engine_stage_seconds_total", stage=stage) > 0
    assert rise("engine_steps_total") == rise("engine_graph_replays_total", mode="eager") >= 24


def test_streamed_requests_and_errors_are_told_apart(base_url: str) -> None:
    before = settled(base_url)
    complete(base_url, stream=True)
    assert httpx.post(f"{base_url}/v1/completions", json={"model": "no-such"}, timeout=60).is_client_error
    streamed = {"endpoint": "completions", "streaming": "true", "finish_reason": "length"}
    after = eventually(
        base_url,
        lambda page: (
            total(page, "requests_total", **streamed) > total(before, "requests_total", **streamed)
            and total(page, "request_errors_total") > total(before, "request_errors_total")
        ),
    )
    assert total(after, "requests_total", **streamed) == total(before, "requests_total", **streamed) + 1
    assert total(after, "request_errors_total") == total(before, "request_errors_total") + 1
    assert not any("no-such" in value for series in after["request_errors_total"] for _, value in series)


def test_latencies_lie_in_buckets_that_can_tell_them(base_url: str) -> None:
    """Counts are cumulative and end in +Inf, and what a laptop takes does not fall into the first bucket."""
    complete(base_url, stream=False)
    page = eventually(base_url, lambda page: total(page, "inter_token_latency_seconds_count") > 0)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_duration_seconds"):
        buckets = sorted((float(dict(series)["le"]), value) for series, value in page[f"{name}_bucket"].items())
        counts = [count for _, count in buckets]
        assert counts == sorted(counts) and buckets[-1] == (float("inf"), total(page, f"{name}_count"))
        assert counts[0] < counts[-1]
