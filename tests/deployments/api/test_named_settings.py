"""An error that a bound of the server causes names the setting that would have allowed the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.admission.fair_queue import AdmissionQueueFull, FairQueue, Waiting
from deployments.api import ApiService, Limits, create_app
from deployments.api.http.access import AccessControl
from deployments.client.protocol import Overloaded
from deployments.config.settings import AdmissionSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from deployments.ingress.grammar_check import GrammarCheck
from engine.base.errors import NeverFits, QueueFull
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from engine.model_files.model_directory import demo_model_path
from engine.text.tokenizer import load_tokenizer
from tests.deployments.support.scripted_api import Client, ScriptedEngine
from tests.engine.support.script import Script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [USER], **fields}


def complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "hi", **fields}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def deep(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


ENDLESS = {"type": "integer", "multipleOf": 99999999}

EXCEEDED: list[tuple[str, Any, tuple[str, dict[str, Any]]]] = [
    ("max_body_bytes", 1024, complete(prompt="x" * 2000)),
    ("max_json_values", 1024, complete(prompt=[1] * 2000)),
    ("max_json_depth", 8, complete(metadata=json.loads("[" * 20 + "]" * 20))),
    ("unknown_fields", "refuse", complete(temprature=1)),
    ("max_choices", 2, chat(n=3)),
    ("max_choices", 2, complete(n=3)),
    ("max_best_of", 2, complete(best_of=3)),
    ("max_beam_width", 2, complete(use_beam_search=True, n=3)),
    ("max_beam_width", 2, complete(use_beam_search=True, best_of=3)),
    ("max_prompts", 1, complete(prompt=["a", "b"])),
    ("max_inputs", 1, ("/v1/embeddings", {"input": ["a", "b"]})),
    ("max_answers", 3, complete(prompt=["a", "b"], n=2)),
    ("max_template_bytes", 20, chat(chat_template_kwargs={"note": "a" * 20})),
    ("max_truncated_tokens", 8, complete(prompt="word " * 400, truncate_prompt_tokens=5)),
    ("max_messages", 1, chat(messages=[USER, USER])),
    ("max_content_parts", 1, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}])),
    ("max_tools", 1, chat(tools=[tool("f"), tool("g")])),
    ("max_tools", 1, chat(messages=[USER, {"role": "assistant", "tool_calls": [CALL, CALL]}])),
    ("max_stop_strings", 1, complete(stop=["a", "b"])),
    ("max_stop_string_chars", 1, complete(stop="ab")),
    ("max_stop_token_ids", 1, complete(stop_token_ids=[1, 2])),
    ("max_logit_bias", 1, complete(logit_bias={"1": 1, "2": 1})),
    ("max_top_logprobs", 1, chat(logprobs=True, top_logprobs=2)),
    ("max_completion_logprobs", 1, complete(logprobs=2)),
    ("max_prompt_logprobs", 1, complete(prompt_logprobs=2)),
    ("max_prompt_logprob_entries", 10, complete(prompt=list(range(5, 30)), prompt_logprobs=1)),
    ("max_priority", 1, complete(priority=2)),
    ("max_hint_chars", 4, complete(cache_salt="x" * 5)),
    ("max_hint_chars", 4, complete(prompt_cache_key="x" * 5)),
    ("max_grammar_bytes", 20, chat(response_format=deep({"const": "x" * 20}))),
    ("max_grammar_bytes", 20, chat(structured_outputs={"json": json.dumps({"const": "x" * 20})})),
    ("max_grammar_bytes", 20, chat(structured_outputs={"choice": ["x" * 21]})),
    ("max_grammar_bytes", 20, chat(structured_outputs={"regex": "x" * 21})),
    ("max_grammar_bytes", 20, chat(structured_outputs={"grammar": "start: " + "x" * 21})),
    ("max_grammar_bytes", 20, chat(tools=[tool("f", a={"const": "x" * 21})])),
    ("max_grammar_bytes", 150, chat(tools=[tool("f", a={"const": "x" * 60}), tool("g", a={"const": "x" * 60})],
                                    tool_choice="required")),
    ("max_schema_depth", 4, chat(response_format=deep(nested(6)))),
    ("max_schema_depth", 4, chat(tools=[tool("f", a=nested(6))])),
    ("max_regex_chars", 3, chat(structured_outputs={"regex": "abcd"})),
    ("max_grammar_choices", 1, chat(structured_outputs={"choice": ["a", "b"]})),
    ("grammar_compile_s", 0.2, chat(structured_outputs={"json": ENDLESS})),
    ("grammar_compile_bytes", 2**24, chat(structured_outputs={"json": ENDLESS})),
]  # fmt: skip
"""A setting, a value, and a request that exceeds it."""
ELSEWHERE = {
    "max_total_body_bytes", "max_header_bytes", "max_headers", "body_timeout_s", "request_timeout_s",
    "idle_timeout_s", "max_waiting_grammars", "max_unread_bytes",
}  # fmt: skip
"""Bounds with a test of their own below, or in test_body.py and test_unread.py."""
REFUSES_NOTHING = {
    "closed_objects", "grammar_processes", "grammar_processes_per_tenant", "known_grammar_bytes",
    "slow_reader_timeout_s", "slow_reader_min_bytes_per_s", "max_chunks_per_s",
    "token_cache_bytes", "prepare_threads",
}  # fmt: skip


def client_with(service: ApiService, grammars: GrammarCheck | None = None, **limits: Any) -> Client:
    if "max_body_bytes" in limits:
        limits["max_total_body_bytes"] = 4 * limits["max_body_bytes"]
    models = {name: replace(served, grammars=grammars) for name, served in service.models.items()}
    return Client(httpx.ASGITransport(create_app(replace(service, models=models, limits=Limits(**limits)))))


def vocabulary() -> Vocabulary:
    return Vocabulary.of(load_tokenizer(demo_model_path()), 4096, [2])


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code >= 400, answer.text
    return str(answer.json()["error"]["message"])


def test_every_bound_of_a_request_is_tested() -> None:
    tested = {setting for setting, _, _ in EXCEEDED}
    assert tested | ELSEWHERE | REFUSES_NOTHING == Limits.model_fields.keys()


@pytest.mark.parametrize(("setting", "value", "request_"), EXCEEDED, ids=lambda value: str(value)[:40])
def test_an_error_about_a_bound_names_its_setting(
    service: ApiService, setting: str, value: Any, request_: tuple[str, dict[str, Any]]
) -> None:
    path, fields = request_
    limits = Limits(**{setting: value} if setting != "max_body_bytes" else {})
    check = GrammarCheck(vocabulary, limits)
    try:
        answer = client_with(service, check, **{setting: value}).post(path, {"model": "demo", **fields})
    finally:
        check.close()
    assert f"limits.{setting}" in message_of(answer)


@pytest.mark.parametrize(
    ("setting", "headers"),
    [
        ("limits.max_headers", {f"x-{number}": "a" for number in range(200)}),
        ("limits.max_header_bytes", {"x-a": "a" * 70_000}),
        ("limits.max_hint_chars", {"x-session-id": "a" * 300}),
    ],
)
def test_headers_that_are_too_many_or_too_large(client: Client, setting: str, headers: dict[str, str]) -> None:
    answer = client.post(COMPLETIONS, {"model": "demo", "prompt": "hi"}, headers=headers)
    assert setting in message_of(answer)


def test_a_body_that_comes_too_late(service: ApiService) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    answer = client_with(service, body_timeout_s=0.01).request("POST", COMPLETIONS, content=slowly())
    assert answer.status_code == 408 and "limits.body_timeout_s" in message_of(answer)


@pytest.mark.parametrize("setting", ["request_timeout_s", "idle_timeout_s"])
def test_an_answer_that_takes_too_long(service: ApiService, engine: ScriptedEngine, setting: str) -> None:
    engine.hangs = True
    limits: dict[str, Any] = {setting: 0.01}
    answer = client_with(service, **limits).post(COMPLETIONS, {"model": "demo", "prompt": "hi"})
    assert answer.status_code == 504 and f"limits.{setting}" in message_of(answer)


@pytest.mark.parametrize(
    "fields", [{"prompt": "word " * 600}, {"prompt": [5] * 512}, {"prompt": "hi", "max_tokens": 600}]
)
def test_an_error_about_the_context_names_its_setting(client: Client, fields: dict[str, Any]) -> None:
    assert "engine.max_model_len" in message_of(client.post(COMPLETIONS, {"model": "demo", **fields}))
    ids = {"model": "demo", "tokens": [5] * 513}
    assert "engine.max_model_len" in message_of(client.post("/detokenize", ids))


def test_more_open_requests_than_an_ingress_takes(service: ApiService) -> None:
    client = Client(httpx.ASGITransport(create_app(replace(service, max_open=0))))
    assert "ingresses.max_ongoing" in message_of(client.post(COMPLETIONS, {"model": "demo", "prompt": "hi"}))


@pytest.mark.parametrize(
    ("setting", "value", "fields"),
    [
        ("max_concurrency", 1, {"n": 2}),
        ("requests_per_minute", 1, {}),
        ("requests_per_minute", 2, {"n": 2}),
        ("tokens_per_minute", 1, {}),
    ],
)
def test_a_tenant_s_limits(service: ApiService, setting: str, value: int, fields: dict[str, Any]) -> None:
    tenant = TenantSettings.model_validate({"name": "t", "key_hashes": (hash_key("k"),), setting: value})
    access = AccessControl(KeyRing((tenant,)))
    client = Client(httpx.ASGITransport(create_app(replace(service, access=access))))
    headers = {"authorization": "Bearer k"}
    body = {"model": "demo", "prompt": "hi", **fields}
    refused = [client.post(COMPLETIONS, body, headers=headers) for _ in range(3)][-1]
    assert f"tenants[].{setting}" in message_of(refused)


@pytest.mark.parametrize(
    "setting",
    ["max_waiting", "max_waiting_tokens", "max_waiting_per_tenant", "max_waiting_tokens_per_tenant"],
)
def test_a_full_queue_of_an_ingress(setting: str) -> None:
    queue: FairQueue[int] = FairQueue({}, AdmissionSettings(**{setting: 1}))
    with pytest.raises(AdmissionQueueFull, match=rf"admission\.{setting}\b"):
        for number in range(3):
            queue.push(Waiting(number, "t", 1))


@pytest.mark.parametrize(("setting", "length"), [("max_waiting", 1), ("max_waiting_tokens", 40)])
def test_a_full_queue_of_an_engine(setting: str, length: int) -> None:
    made = Script(limits={setting: length})
    with pytest.raises(QueueFull, match=rf"engine\.{setting}\b"):
        for _ in range(20):
            made.arrive(prompt=range(30), max_tokens=5)


def test_an_error_about_the_memory_names_its_settings() -> None:
    with pytest.raises(NeverFits, match=r"engine\.max_model_len.*engine\.kv_pages"):
        Script().arrive(prompt=range(30), max_tokens=10**6)


def test_more_grammars_than_may_wait() -> None:
    async def scenario() -> None:
        check = GrammarCheck(vocabulary, Limits(max_waiting_grammars=1))
        slow = asyncio.create_task(check.check(Grammar("json_schema", json.dumps(ENDLESS))))
        try:
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match=r"limits\.max_waiting_grammars"):
                await check.check(Grammar("regex", "b"))
        finally:
            slow.cancel()
            check.close()

    asyncio.run(scenario())
