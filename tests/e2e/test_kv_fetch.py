"""Replicas on Ray fetch KV from each other: addresses and keys reach the ingress, and a prompt its source."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import Service, running

pytestmark = pytest.mark.e2e

PROMPT = "The same long beginning of many prompts. " * 20


def test_a_replica_fetches_what_the_other_one_has_computed(service: Service) -> None:
    """Prompts go to one of two replicas at random, so after some both have been asked."""
    arguments = {
        "engine": {"model": "demo", "kv_pages": 512, "threads": 1, "host_kv_gib": 0.05},
        "engines": {"count": 2, "num_cpus": 0.1, "kv_fetch": {"expected_mib_per_s": 100_000}},
        "ingresses": {"num_cpus": 0.1},
        "router": {"policy": "random"},
    }
    with running("fetching", arguments) as fetching:
        answers: set[str] = set()

        def fetched() -> float:
            ask = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{fetching.url}/v1/completions", json=ask, timeout=60).json()
            answers.add(answer["choices"][0]["text"])
            return fetching.metric("raydix_kv_transfer_pages_total", tier="peer", direction="in")

        fetching.wait_until(lambda: fetched() > 0)
        fetching.wait_until(
            lambda: fetching.metric("raydix_kv_transfer_pages_total", tier="peer", direction="out") == fetched()
        )
        assert len(answers) == 1
        assert fetching.metric("raydix_kv_transfer_failed_pages_total", tier="peer") == 0
