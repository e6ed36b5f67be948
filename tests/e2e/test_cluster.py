"""The application as a cluster: placement, clients that leave, overload, draining."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.client.protocol import GenerateRequest
from engine import SamplingParams
from tests.e2e.conftest import Service, running
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}


def chat(system: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


def test_both_replicas_are_up(service: Service) -> None:
    def is_up() -> bool:
        health = service.health()
        ages = [replica["heartbeat_age_s"] for replica in health["replicas"]]
        return (health["status"], health["replicas_up"]) == ("healthy", 2) and max(ages) < 1

    service.wait_until(is_up)


def test_requests_that_share_a_system_prompt_share_a_replica_and_its_cache(service: Service) -> None:
    system = "You answer questions on the standard library, briefly and with an example. " * 6
    before = {name: _finished_prompts(service, name) for name in service.replicas()}
    cached = []
    with httpx.Client(base_url=service.url, timeout=60) as client:
        shared = len(client.post("/tokenize", json={"prompt": system}).json()["tokens"])
        for number in range(20):
            answer = client.post("/v1/chat/completions", json=chat(system, f"Question {number}?"))
            usage = answer.raise_for_status().json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert all(tokens >= shared for tokens in cached[1:]), (shared, cached)
    service.wait_until(
        lambda: sorted(_finished_prompts(service, name) > count for name, count in before.items()) == [False, True]
    )


def test_different_system_prompts_spread_over_the_replicas(service: Service) -> None:
    """Prompts keep coming: a replica that was measured while the machine was busy gets none for a while."""
    before = {name: _finished_prompts(service, name) for name in service.replicas()}
    numbers = itertools.count()

    def another_spreads_them() -> bool:
        prompt = chat(f"You are number {next(numbers)}. " * 20, "Hello")
        httpx.post(f"{service.url}/v1/chat/completions", json=prompt, timeout=60).raise_for_status()
        return all(_finished_prompts(service, name) > count for name, count in before.items())

    service.wait_until(another_spreads_them)


def test_twenty_choices_of_one_request_all_arrive(service: Service) -> None:
    """Serve would route only one of several handle calls made for one HTTP request."""
    prompts = [f"Prompt {number}" for number in range(20)]
    answer = httpx.post(f"{service.url}/v1/completions", json=completion("") | {"prompt": prompts}, timeout=60)
    assert [choice["index"] for choice in answer.raise_for_status().json()["choices"]] == list(range(20))


def test_a_program_with_a_handle_gets_whole_outputs_from_the_replica_that_has_the_prefix(service: Service) -> None:
    engines = serve.get_deployment_handle("EngineReplica", "raydix")
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    shared = [token % 500 + 10 for token in range(400)]
    asked = [GenerateRequest(f"handle-{number}", "demo", [*shared, number + 10], sampling) for number in range(6)]
    answers = [engines.generate.remote(request) for request in asked]
    outcomes = [answer.result(timeout_s=PATIENCE_S) for answer in answers]
    assert [len(outcome.output.token_ids) for outcome in outcomes] == [4] * 6
    assert len({outcome.replica for outcome in outcomes}) == 1
    assert max(outcome.output.num_cached for outcome in outcomes) >= 384
    unknown = GenerateRequest("handle-unknown", "demo", [10**6], sampling)
    refused = engines.generate.remote(unknown).result(timeout_s=PATIENCE_S)
    assert (refused.output, refused.refusal) == (None, "never_fits")


def test_a_client_that_leaves_frees_its_pages(service: Service) -> None:
    body = completion("Tell a long story", max_tokens=4000, stream=True, ignore_eos=True)
    aborted = service.metric("raydix_requests_total", finish_reason="abort")
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept: the connection closes with the iterator
        assert next(lines).startswith("data:")
        service.wait_until(lambda: _running(service) == 1)
    service.wait_until(lambda: _running(service) == 0)
    # Not just over: then its end would be "length".
    service.wait_until(lambda: service.metric("raydix_requests_total", finish_reason="abort") == aborted + 1)


def test_streams_stay_apart_under_load(service: Service) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
            alone = [await _text(client, number) for number in range(4)]
            together = await asyncio.gather(*(_text(client, number % 4) for number in range(24)))
            assert together == [alone[number % 4] for number in range(24)]

    asyncio.run(scenario())


def test_overload_is_answered_with_429_and_a_stopped_application_lets_streams_end(service: Service) -> None:
    engine = {"model": "demo", "kv_pages": 256, "max_running": 1, "max_waiting": 1, "threads": 1}
    arguments = {
        "engine": engine,
        "engines": {"num_cpus": 0.1, "drain_timeout_s": 600},
        "ingresses": {"num_cpus": 0.1, "drain_timeout_s": 600},
        "admission": {"max_waiting": 1},
    }
    body = completion("A long story", max_tokens=1200, stream=True, ignore_eos=True)

    async def scenario(small: Service) -> None:
        def is_busy() -> bool:
            (load,) = small.replicas().values()
            return bool(load["num_running"] == 1)

        async with httpx.AsyncClient(base_url=small.url, timeout=120) as client:
            stream = asyncio.create_task(_lines(client, body))
            await asyncio.to_thread(small.wait_until, is_busy)
            # Some more wait for the engine, in its queue or before it; then there is no place left.
            others = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(6)]
            done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            for refused in (task.result() for task in done):
                assert refused.status_code == 429, refused.text
                assert int(refused.headers["retry-after"]) >= 1
            for task in waiting:
                task.cancel()
            serve.delete("small", _blocking=False)
            assert (await stream)[-1] == "data: [DONE]"

    with running("small", arguments) as small:
        asyncio.run(scenario(small))


async def _lines(client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        return [line async for line in response.aiter_lines() if line]


async def _text(client: httpx.AsyncClient, number: int) -> str:
    body = completion(f"What does function {number} do?", max_tokens=24, stream=True)
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return text


def _finished_prompts(service: Service, replica: str) -> float:
    return service.metric("raydix_prefix_cache_query_tokens_total", replica=replica)


def _running(service: Service) -> int:
    return sum(replica["num_running"] + replica["num_waiting"] for replica in service.health()["replicas"])
