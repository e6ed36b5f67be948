"""A program's prompts go through the API of its ingress, and their answers come back as they are there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.api.record.request_record import RequestRecord
from deployments.batch.errors import BatchStopped
from deployments.batch.prompts import Answer, Prompt
from deployments.client.protocol import GenerateRequest, Overloaded, Turn
from deployments.config.settings import BatchSettings
from deployments.config.tenants import ANONYMOUS, KeyRing, TenantSettings, hash_key
from deployments.ingress.in_process import InProcessApi
from deployments.ingress.many import ManyPrompts
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import ScriptedEngine, ScriptedGeneration
from tests.support.metric_values import count_of


def many(service: ApiService, **settings: Any) -> ManyPrompts:
    return ManyPrompts(create_app(service), service, BatchSettings(**settings))


def ask(prompts: Sequence[Prompt], run: ManyPrompts, *args: Any, **options: Any) -> list[Answer]:
    """Return the answers in the order of the prompts."""

    async def scenario() -> list[Answer]:
        async with aclosing(run.answers(prompts, *args, **options)) as answers:
            return sorted([answer async for ready in answers for answer in ready], key=lambda answer: answer.index)

    return asyncio.run(scenario())


def test_prompts_may_be_texts_token_ids_chats_or_bodies(service: ApiService, engine: ScriptedEngine) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    prompts: list[Prompt] = ["Hello", [5, 6, 7], chat, {"prompt": "Hello", "max_tokens": 2}, {"messages": chat}]
    answers = ask(prompts, many(service), {"max_tokens": 4})
    assert [answer.status for answer in answers] == [200] * 5
    objects = [answer.body["object"] for answer in answers]
    assert objects == [
        "text_completion",
        "text_completion",
        "chat.completion",
        "text_completion",
        "chat.completion",
    ]
    by_prompt = {tuple(request.prompt_ids): request for request in engine.requests}
    assert (5, 6, 7) in by_prompt and len(by_prompt) == 3
    assert [answer.body["usage"]["completion_tokens"] for answer in answers] == [4, 4, 4, 2, 4]
    assert answers[0].text == "The quick brown fox"[: len(answers[0].text or "")] and answers[0].text
    assert answers[2].text == answers[0].text and answers[0].error is None
    assert all(answer.request_id.startswith("req-") for answer in answers)


def test_an_answer_names_the_ignored_fields_of_its_body(service: ApiService) -> None:
    answers = ask([{"prompt": "a", "shiny": 1, "glossy": 1}, "b"], many(service), {"max_tokens": 4})
    assert [answer.ignored_fields for answer in answers] == ["shiny, glossy", ""]


def test_columns_of_numpy_are_prompts_too(service: ApiService, engine: ScriptedEngine) -> None:
    texts = np.array(["one", "two"], dtype=object)
    prompts: list[Any] = [*texts, np.array([5, 6, 7])]
    answers = ask(prompts, many(service), {"max_tokens": np.int64(3)})
    assert [answer.status for answer in answers] == [200] * 3
    assert [5, 6, 7] in [request.prompt_ids for request in engine.requests]


def test_a_wrong_prompt_is_an_answer_and_the_others_are_answered(
    service: ApiService, engine: ScriptedEngine
) -> None:
    prompts: list[Any] = [
        "good",
        None,
        {"prompt": "x", "stream": True},
        {"prompt": object()},
        "",
        {"messages": []},
    ]
    answers = ask(prompts, many(service), {"max_tokens": 2})
    assert [answer.status for answer in answers] == [200, 400, 400, 400, 400, 400]
    errors = [str(answer.error) for answer in answers]
    for error, part in zip(
        errors[1:],
        ["NoneType is neither a text", "stream is set", "it holds an object of object", "is empty", "is empty"],
        strict=True,
    ):
        assert part in error
    assert [answer.text for answer in answers[1:]] == [None] * 5
    assert len(engine.requests) == 1


def test_requests_give_way_to_all_others_whatever_priority_they_ask_for(
    service: ApiService, engine: ScriptedEngine
) -> None:
    ask(["a", {"prompt": "b", "priority": 5}], many(service), {"max_tokens": 1})
    ask(["c"], many(service), {"max_tokens": 1, "priority": 3})
    assert [(request.priority, request.tenant) for request in engine.requests] == [
        (10, "batch"), (5, "batch"), (3, "batch"),
    ]  # fmt: skip
    ask([{"prompt": "d", "priority": -100, "service_tier": "priority"}], many(service), {"max_tokens": 1})
    assert all(request.is_deferrable for request in engine.requests)


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": "a", "background": True}),
    ],
)
@pytest.mark.parametrize("is_of_batch", [True, False])
def test_requests_of_a_batch_are_deferrable_and_those_of_clients_are_not(
    service: ApiService, engine: ScriptedEngine, url: str, fields: dict[str, Any], is_of_batch: bool
) -> None:
    app = create_app(replace(service, max_open=0 if is_of_batch else 1))

    async def scenario() -> None:
        body = {"model": next(iter(service.models)), "max_tokens": 16, "max_output_tokens": 16, **fields}
        body.pop("max_tokens" if "responses" in url else "max_output_tokens")
        if is_of_batch:  # it needs none of the places of clients
            assert (await InProcessApi(app, ANONYMOUS).post(url, json.dumps(body).encode())).status == 200
        else:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
                assert (await client.post(url, json=body)).status_code == 200
        while not engine.requests:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert {request.is_deferrable for request in engine.requests} == {is_of_batch}


@pytest.mark.parametrize("has_tenants", [False, True])
def test_clients_share_the_engines_by_address_where_there_are_no_tenants(
    service: ApiService, engine: ScriptedEngine, has_tenants: bool
) -> None:
    if has_tenants:
        service = closed(service, TenantSettings(name="red", key_hashes=(hash_key("key"),)))
    app = create_app(service)

    async def scenario() -> None:
        for address in ("10.0.0.1", "::1"):
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
                body = {"model": next(iter(service.models)), "prompt": "a", "max_tokens": 1}
                headers = {"authorization": "Bearer key"}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    asyncio.run(scenario())
    found = [request.sharer for request in engine.requests]
    assert found == (["red", "red"] if has_tenants else ["anonymous@10.0.0.1", "anonymous@::1"])


def test_requests_in_flight_are_bounded_and_a_call_may_ask_for_fewer(
    service: ApiService, engine: ScriptedEngine
) -> None:
    num_open: list[int] = []

    class Counting(ScriptedEngine):
        async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> ScriptedGeneration:
            generation = await super().generate(request, turn)
            num_open.append(sum(not one.closed for one in self.generations))
            return generation

    counting = Counting(engine.codec)
    [(name, served)] = service.models.items()
    counted = replace(service, models={name: replace(served, client=counting)})
    for asked, most in ((None, 4), (2, 2), (100, 4)):
        num_open.clear()
        ask(["p"] * 20, many(counted, max_in_flight=4), {"max_tokens": 5}, max_in_flight=asked)
        assert max(num_open) <= most and len(num_open) == 20
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        ask(["p"], many(counted), max_in_flight=0)


def test_a_refusal_is_waited_out(service: ApiService, engine: ScriptedEngine) -> None:
    class Full(ScriptedEngine):
        async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> ScriptedGeneration:
            if sum(not one.closed for one in self.generations) >= 2:
                raise Overloaded("every queue is full", 0.01)
            return await super().generate(request, turn)

    [(name, served)] = service.models.items()
    full = replace(service, models={name: replace(served, client=Full(engine.codec))})
    answers = ask(["p"] * 30, many(full, max_in_flight=8), {"max_tokens": 3})
    assert [answer.status for answer in answers] == [200] * 30


def test_a_reader_that_leaves_aborts_the_requests_in_flight(service: ApiService, engine: ScriptedEngine) -> None:
    async def scenario() -> None:
        async with aclosing(many(service, max_in_flight=4).answers(["a", "b", "c", "d"] * 5)) as answers:
            await anext(answers)
            engine.hangs = True
            while not any(one.hangs for one in engine.generations):
                await asyncio.sleep(0)
        assert all(one.closed for one in engine.generations)
        assert len(engine.generations) < 20

    asyncio.run(scenario())


def test_an_ingress_that_is_to_stop_finishes_the_requests_that_it_has_begun(service: ApiService) -> None:
    answers: list[Answer] = []
    run = ManyPrompts(
        create_app(service), service, BatchSettings(max_in_flight=2), is_stopping=lambda: len(answers) >= 5
    )

    async def scenario() -> None:
        async with aclosing(run.answers(["p"] * 50, {"max_tokens": 2})) as found:
            async for ready in found:
                answers.extend(ready)

    with pytest.raises(BatchStopped, match=r"after \d+ of 50 prompts; call again with those that have no answer"):
        asyncio.run(scenario())
    # When five have been read, two may wait for the reader, and two be in flight.
    assert 5 <= len(answers) <= 5 + 4 and {answer.status for answer in answers} == {200}


def test_an_ingress_that_is_to_stop_does_not_wait_for_engines_that_refuse(
    service: ApiService, engine: ScriptedEngine
) -> None:
    """An application that is deleted stops its engines and its ingresses at the same time."""
    engine.refuse_with = Overloaded("every queue is full", 1.0)
    run = ManyPrompts(
        create_app(service), service, BatchSettings(max_in_flight=2), is_stopping=lambda: bool(engine.requests)
    )
    with pytest.raises(BatchStopped, match="after 0 of 50 prompts"):
        ask(["p"] * 50, run, {"max_tokens": 2})
    assert len(engine.requests) <= 2


TENANT = TenantSettings(name="nightly", key_hashes=(hash_key("rdx-secret"),), isolate_cache=True, priority=3)


def closed(service: ApiService, *tenants: TenantSettings) -> ApiService:
    return replace(service, access=AccessControl(KeyRing(tenants)))


def test_a_call_may_belong_to_a_tenant_of_the_configuration(service: ApiService, engine: ScriptedEngine) -> None:
    run = many(closed(service, TENANT))
    [answer] = ask(["a"], run, {"max_tokens": 1}, tenant="nightly")
    assert answer.status == 200
    [request] = engine.requests
    assert (request.tenant, request.salt) == ("nightly", "tenant:nightly:")
    with pytest.raises(ValueError, match="there is no tenant 'other'"):
        ask(["a"], run, tenant="other")


def test_the_tenant_named_batch_owns_calls_that_name_none(service: ApiService, engine: ScriptedEngine) -> None:
    mine = TENANT.model_copy(update={"name": "batch", "max_concurrency": 1})
    answers = ask(["a"] * 5, many(closed(service, mine)), {"max_tokens": 1})
    assert [answer.status for answer in answers] == [200] * 5
    assert {request.salt for request in engine.requests} == {"tenant:batch:"}


def test_requests_are_counted_and_reported_like_others(service: ApiService, metrics: Metrics) -> None:
    reported: list[RequestRecord] = []
    ask(["a", ""], many(replace(service, listeners=(reported.append,))), {"max_tokens": 2})
    assert sorted((record.status, record.tenant, record.endpoint) for record in reported) == [
        (200, "batch", "completions"), (400, "batch", "completions"),
    ]  # fmt: skip
    route = {"route": "/v1/completions", "method": "POST"}
    assert [count_of(metrics, "http_requests_total", status=code, **route) for code in ("200", "400")] == [1, 1]
