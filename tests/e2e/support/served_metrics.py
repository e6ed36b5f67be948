"""Read the running application's /metrics, and make requests that are counted there."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from monitoring.metric_table import PREFIX
from tests.support.waiting import PATIENCE_S

Labels = frozenset[tuple[str, str]]
Page = dict[str, dict[Labels, float]]
"""Values by series name, without the prefix, and labels."""

PUSH_S = 1.0
"""How often processes report."""
PROMPT = "What does itertools.chain do? And what is the difference to itertools.product, in one sentence?"


def read_page(base_url: str) -> Page:
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


def sum_of(page: Page, name: str, **labels: str) -> float:
    """Sum over all series with these labels among theirs."""
    return sum(value for series, value in page.get(name, {}).items() if labels.items() <= set(series))


def replicas_of(page: Page, name: str) -> set[str]:
    return {dict(series)["replica"] for series in page.get(name, {})}


def read_until(base_url: str, holds: Callable[[Page], bool], seconds: float = PATIENCE_S) -> Page:
    """The page once `holds`, or the last one: processes report once a second."""
    deadline = time.monotonic() + seconds
    while not holds(page := read_page(base_url)) and time.monotonic() < deadline:
        time.sleep(PUSH_S / 4)
    return page


def read_when_settled(base_url: str) -> Page:
    """The page when earlier tests' requests have ended and been reported: two reports later it is the same."""
    read_until(base_url, lambda page: sum_of(page, "requests_running") + sum_of(page, "requests_waiting") == 0)
    page = read_page(base_url)
    while True:
        time.sleep(2 * PUSH_S)
        before, page = page, read_page(base_url)
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
