"""Replicas on Ray compute long prompts for each other: roles, addresses and keys reach the ingress."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import Service, running

pytestmark = pytest.mark.e2e

PROMPT = "The same long beginning of many prompts. " * 20


def test_a_long_prompt_is_computed_by_one_replica_and_answered_by_the_other(service: Service) -> None:
    """The second answer comes from the second replica alone, which has fetched the prompt's KV for the first, each
    rank its part.
    """
    arguments = {
        "engine": {"model": "demo", "kv_pages": 512, "threads": 1, "host_kv_gib": 0.05, "tensor_parallel_size": 2},
        "engines": {
            "num_cpus": 0.1,
            "roles": {"prefill": {"min": 1, "max": 2}, "decode": 1, "disaggregate_above_tokens": 100},
        },
        "ingresses": {"num_cpus": 0.1},
    }
    with running("apart", arguments) as apart:

        def ask() -> tuple[str, int]:
            asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{apart.url}/v1/completions", json=asked, timeout=60).json()
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        first, num_cached = ask()
        assert num_cached == 0
        again, num_cached = ask()
        assert again == first and num_cached > 100

        def moved(direction: str) -> float:
            return apart.metric("raydix_kv_transfer_pages_total", tier="peer", direction=direction)

        apart.wait_until(lambda: moved("in") == moved("out") > 0)
        apart.wait_until(
            lambda: apart.metric("raydix_migrations_total", reason="handed_over", outcome="resumed") == 1
        )
        assert apart.metric("raydix_kv_transfer_failed_pages_total", tier="peer") == 0
