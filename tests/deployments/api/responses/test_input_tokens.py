"""POST /v1/responses/input_tokens counts the prompt of a response; /v1/responses/compact is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deployments.api.responses.conftest import ASK, WEATHER, Responses
from tests.deployments.support.chat_templates import HERMES

Make = Callable[..., Responses]
PATH = "/v1/responses/input_tokens"
PATCH = {"type": "custom", "name": "apply_patch"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"instructions": "Be brief."},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        {
            "tools": [
                WEATHER,
                PATCH,
                {"type": "web_search"},
                {"type": "namespace", "name": "n", "tools": [WEATHER]},
            ]
        },
        {"tools": [WEATHER], "tool_choice": "none"},
        {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "max_output_tokens": 5, "stream": True},
        {"background": True, "store": True, "temperature": 0, "truncation": "auto", "parallel_tool_calls": False},
    ],
)
def test_tokens_are_counted_as_they_are_used(ask: Make, change: dict[str, Any]) -> None:
    it = ask(HERMES)
    counted = it.client.post(PATH, ASK | change)
    assert counted.status_code == 200, counted.text
    assert not it.engine.requests
    it.whole(**change | {"stream": None, "background": None})
    num_tokens = len(it.engine.requests[-1].prompt_ids)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": num_tokens}


def test_openais_client_reads_it(ask: Make) -> None:
    it = ask(HERMES)
    counted: Any = it.client.run(lambda ai: ai.responses.input_tokens.count(model="demo", input="hi"))
    assert counted.object == "response.input_tokens" and counted.input_tokens > 1


def test_the_conversation_that_a_response_continues_is_counted_too(ask: Make) -> None:
    it = ask(HERMES)
    first = it.whole()
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    user = {"role": "user", "content": "hi"}
    talk = it.client.post("/v1/conversations", {"items": [user]}).json()["id"]
    for change in ({"previous_response_id": first["id"]}, {"conversation": talk}, {"input": [user, item, user]}):
        counted = it.client.post(PATH, ASK | change).json()["input_tokens"]
        it.whole(**change)
        assert counted == len(it.engine.requests[-1].prompt_ids)
    alone = it.client.post(PATH, {"model": "demo", "previous_response_id": first["id"]})
    assert 1 < alone.json()["input_tokens"] < counted + 100


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": 5}, 400, "input"),
        ({"input": ...}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "wizard", "content": "a"}]}, 400, "input.0.role"),
        ({"input": "word " * 9000}, 400, "input"),
        ({"model": ...}, 400, "model"),
        ({"model": "other"}, 404, "model"),
        ({"tools": [WEATHER, WEATHER]}, 400, "tools.1.name"),
        ({"previous_response_id": "resp_" + "0" * 32}, 404, "previous_response_id"),
    ],
)
def test_a_wrong_field_is_named(ask: Make, change: dict[str, Any], status: int, param: str) -> None:
    body = {name: value for name, value in (ASK | change).items() if value is not ...}
    response = ask(HERMES).client.post(PATH, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_ignored_and_unknown_fields_are_named(ask: Make) -> None:
    response = ask(HERMES).client.post(PATH, ASK | {"personality": "friendly", "tools": [{"type": "mcp"}]})
    assert response.headers["x-raydix-ignored-fields"] == "personality, tools.0:mcp"


def test_compacting_is_not_there_and_no_name_of_a_response(ask: Make) -> None:
    it = ask(HERMES)
    for path in ("/v1/responses/compact", "/v1/responses/compact/"):
        response = it.client.post(path, ASK)
        error = response.json()["error"]
        assert response.status_code == 404 and "allow" not in response.headers
        assert (
            "no path '/v1/responses/compact'" in error["message"] and "compact conversations" in error["message"]
        )
    for method in ("GET", "DELETE"):
        assert it.client.request(method, "/v1/responses/compact").status_code == 404
    assert it.client.post("/v1/responses/resp_1", ASK).status_code == 405
    assert it.client.request("OPTIONS", "/v1/responses/compact").status_code == 204
