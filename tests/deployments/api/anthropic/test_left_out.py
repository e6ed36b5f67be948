"""Conversations of Claude Code go on with a model that reads only text, whatever its tools have shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deployments.api import Limits
from tests.deployments.api.anthropic.conftest import ASK, CLOCK, Messages
from tests.deployments.support.chat_templates import HERMES

Make = Callable[..., Messages]
IGNORED = "x-raydix-ignored-fields"
USER = ASK["messages"][0]
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}
SEEN = "[image omitted: this model reads only text]"


def result(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(content)}]}


def sent(it: Messages, path: str = "/v1/messages", **change: Any) -> tuple[int, str | None]:
    response = it.post(path, **change)
    return response.status_code, response.headers.get(IGNORED)


def test_a_conversation_with_an_image_in_a_result_continues(ask: Make) -> None:
    it = ask(HERMES)
    messages = [USER, USE, result({"type": "text", "text": "Read."}, PNG)]
    named = "messages.2.content.0.content.1:image"
    assert sent(it, messages=messages) == (200, named)
    assert f"<tool_response>Read.\n{SEEN}</tool_response>" in it.talk.prompt()
    later = [*messages, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And now?"}]
    assert sent(it, messages=later) == (200, named)
    assert sent(it, messages=later, stream=True) == (200, named)
    assert sent(it, "/v1/messages/count_tokens", max_tokens=..., messages=later) == (200, named)
    counted = it.counted(messages=later)
    assert counted == len(it.engine.requests[-1].prompt_ids)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (PNG, SEEN),
        (PDF, "[document omitted: this model reads only text]"),
        ({"type": "document", "source": {"type": "url", "url": "x"}}, "[document omitted"),
        ({"type": "container_upload", "file_id": "f"}, "[container_upload omitted"),
        ({"type": "of-the-future", "x": 1}, "[of-the-future omitted"),
    ],
)
def test_a_block_that_no_text_model_reads_is_replaced_by_a_text(
    ask: Make, block: dict[str, Any], text: str
) -> None:
    it = ask(HERMES)
    kind = block["type"]
    assert sent(it, messages=[{"role": "user", "content": [block]}]) == (200, f"messages.0.content.0:{kind}")
    assert it.talk.prompt().count(text) == 1
    assert sent(it, messages=[USER, USE, result(block)]) == (200, f"messages.2.content.0.content.0:{kind}")
    assert it.talk.prompt().count(text) == 1
    assert sent(it, system=[block]) == (200, f"system.0:{kind}")
    strict = ask(HERMES, Limits(unknown_fields="refuse"))
    for messages in ([{"role": "user", "content": [block]}], [USER, USE, result(block)]):
        assert repr(kind) in strict.refused(messages=messages)


@pytest.mark.parametrize(
    "block",
    [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "Rain."},
            "title": "A",
        },
        {"type": "document", "source": {"type": "content", "content": "Rain."}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Rain."}]}},
        {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "Rain."}]},
    ],
)
def test_documents_that_are_text_are_read(ask: Make, block: dict[str, Any]) -> None:
    it = ask(HERMES)
    for messages in ([{"role": "user", "content": [block]}], [USER, USE, result(block)]):
        assert sent(it, messages=messages) == (200, None)
        assert "Rain." in it.talk.prompt() and "omitted" not in it.talk.prompt()


def test_blocks_of_anthropics_own_tools_are_left_out_of_answers_and_named(ask: Make) -> None:
    it = ask(HERMES)
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "It rains."},
    ]
    messages = [USER, {"role": "assistant", "content": blocks}, USER]
    named = "messages.1.content.0:server_tool_use, messages.1.content.1:web_search_tool_result"
    assert sent(it, messages=messages) == (200, named)
    prompt = it.talk.prompt()
    it.whole(messages=[USER, {"role": "assistant", "content": "It rains."}, USER])
    assert it.talk.prompt() == prompt


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1024, "display_height_px": 768},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "m"},
    ],
)
def test_tools_that_only_anthropics_models_know_are_left_out_and_named(ask: Make, tool: dict[str, Any]) -> None:
    it = ask(HERMES)
    it.whole(tools=[CLOCK])
    named = f"tools.0:{tool['type']}"
    assert sent(it, tools=[tool, CLOCK]) == (200, named)
    assert it.engine.requests[0].prompt_ids == it.engine.requests[1].prompt_ids
    assert sent(it, tools=[tool]) == (200, named)
    assert sent(it, "/v1/messages/count_tokens", max_tokens=..., tools=[tool]) == (200, named)
    assert "cannot run" in it.refused(tools=[tool], tool_choice={"type": "any"})
    strict = ask(HERMES, Limits(unknown_fields="refuse"))
    assert "tools.1 is a tool of the type" in strict.refused(tools=[CLOCK, tool])


def test_servers_of_tools_are_left_out_and_named(ask: Make) -> None:
    assert sent(ask(HERMES), mcp_servers=[{"type": "url", "url": "x", "name": "m"}]) == (200, "mcp_servers")
