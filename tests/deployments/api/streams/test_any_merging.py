"""A stream that is cut after any event has the same later events, however its tokens arrive the second time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api import ApiService, Limits, ModelCard, ServedModel, create_app
from monitoring.metrics import Metrics
from tests.deployments.api.dialects.conftest import TOOLS, codec_of
from tests.deployments.api.streams.conftest import EVENTS, adoptable, events_of
from tests.deployments.support.api_over_engines import no_metrics
from tests.deployments.support.chat_templates import HARMONY, HERMES, THINKING
from tests.deployments.support.scripted_api import Client, ScriptedEngine
from tests.support.examples import examples

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
PATCH = {"type": "custom", "custom": {"name": "apply_patch"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo ð\\u00e9"}}\n</tool_call>'
PATCHED = (
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "a \\"b\\"\\n\\ud83d\\ude00é"}}\n</tool_call>'
)
MIXED = f"<think>\nIs it {CALL}? 🌍\n</think>\n\n  I look. \n {CALL}\n It rains. {CALL}{PATCHED}\n"
CHANNELS = (
    "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>final<|message|>It is.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Again?<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
)


@dataclass(frozen=True)
class Case:
    """A request, and the text of its answer."""

    path: str
    body: dict[str, Any]
    says: str = "The quick brown 🦊 jumps — über — the lazy dog. \n\n END of it."
    template: str | None = None


ANTHROPIC = [{"name": "get_weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
RESPONSE_TOOLS = [{"type": "function", **TOOLS[0]["function"]}, {"type": "custom", "name": "apply_patch"}]
CASES = {
    "chat": Case(CHAT, HI | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "chat, stop strings": Case(CHAT, HI | {"stop": ["END", "dog. x", "azy"], "return_token_ids": True}),
    "chat, stop included": Case(CHAT, HI | {"stop": ["END"], "include_stop_str_in_output": True}),
    "chat, logprobs": Case(CHAT, HI | {"logprobs": True, "top_logprobs": 2, "stop": [" END"]}),
    "chat, logprobs and calls": Case(
        CHAT, HI | {"logprobs": True, "tools": [*TOOLS, PATCH], "max_tokens": 450}, MIXED, HERMES
    ),
    "chat, calls": Case(CHAT, HI | {"tools": [*TOOLS, PATCH], "max_tokens": 450}, MIXED, HERMES),
    "chat, thinking": Case(CHAT, HI | {"tools": TOOLS, "max_tokens": 450}, MIXED[8:], THINKING),
    "chat, one call": Case(CHAT, HI | {"tools": TOOLS, "parallel_tool_calls": False}, f"I {CALL}{CALL}", HERMES),
    "chat, channels": Case(CHAT, HI | {"tools": TOOLS, "max_tokens": 450}, CHANNELS, HARMONY),
    "chat, cut off": Case(CHAT, HI | {"max_tokens": 11}),
    "completion": Case(COMPLETIONS, {"prompt": "Hi", "max_tokens": 60, "echo": True}),
    "completion, logprobs": Case(COMPLETIONS, {"prompt": "Hi", "max_tokens": 60, "logprobs": 2, "stop": "END"}),
    "message": Case(MESSAGES, HI | {"max_tokens": 60, "stop_sequences": ["END"]}),
    "message, calls": Case(MESSAGES, HI | {"max_tokens": 450, "tools": ANTHROPIC}, MIXED, HERMES),
    "message, channels": Case(MESSAGES, HI | {"max_tokens": 450, "tools": ANTHROPIC}, CHANNELS, HARMONY),
    "response": Case(RESPONSES, {"input": "Hi", "store": False}),
    "response, logprobs": Case(
        RESPONSES, {"input": "Hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"], "store": False}
    ),
    "response, calls": Case(RESPONSES, {"input": "Hi", "tools": RESPONSE_TOOLS, "store": False}, MIXED, HERMES),
    "response, channels": Case(RESPONSES, {"input": "Hi", "tools": RESPONSE_TOOLS}, CHANNELS, HARMONY),
}
_NOW = re.compile(rb'"completed_at":\d+')


@cache
def talk(template: str | None) -> tuple[Client, ScriptedEngine]:
    """A client of a model with this template, and the engine."""
    codec, metrics = codec_of(template, (), frozenset()), Metrics("demo", "ingress-1")
    engine, card = ScriptedEngine(codec), ModelCard("demo", created=1, max_model_len=4096, vocab_size=4096)
    service = ApiService({"demo": ServedModel(card, engine, codec, metrics)}, no_metrics, Limits(), metrics)
    return Client(httpx.ASGITransport(create_app(service))), engine


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_later_events_are_the_same(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    client, engine = talk(case.template)
    body = {"model": "demo", "stream": True} | case.body
    sizes = st.lists(st.sampled_from([1, 1, 2, 3, 5, 9, 30, 60, 90]), max_size=30)
    engine.says, engine.chunks, engine.chunk = case.says, data.draw(sizes), data.draw(st.integers(1, 20))
    answer = client.post(case.path, body, headers=EVENTS)
    assert answer.status_code == 200, answer.text
    whole = events_of(answer.content)
    at = data.draw(st.integers(1, len(whole)))
    last = whole[at - 1][0]
    count = int(last.split(":")[2])
    before, after, total = data.draw(sizes), [], 0
    for size in [*engine.chunks, *[engine.chunk] * 500]:  # as the first time, after the position
        after += [size] if total >= count else []
        total += size
    fed = 0
    again = []
    for size in [*before, *[7] * 500]:
        again += [min(size, count - fed)] if fed < count else []
        fed += size
    engine.chunks, engine.chunk = [*again, *after], 1
    engine.found.clear()
    if data.draw(st.booleans()):
        adoptable(engine, last)
    answer = client.post(case.path, body, headers={"last-event-id": last})
    assert answer.status_code == 200, answer.text
    assert without_times(events_of(answer.content)) == without_times(whole[at:])


def without_times(events: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [(id, _NOW.sub(b"", event)) for id, event in events]


@pytest.mark.parametrize("name", ["message, channels", "response, channels"])
def test_blocks_have_the_same_numbers_when_thoughts_follow_text(name: str) -> None:
    case = CASES[name]
    client, engine = talk(case.template)
    body = {"model": "demo", "stream": True} | case.body
    engine.says, engine.chunks, engine.chunk = case.says, (), 1
    whole = events_of(client.post(case.path, body, headers=EVENTS).content)
    at = len(whole) - 8
    for engine.chunk in range(20, 140, 3):
        rest = events_of(client.post(case.path, body, headers={"last-event-id": whole[at - 1][0]}).content)
        assert without_times(rest) == without_times(whole[at:])
