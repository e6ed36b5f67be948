"""What a chat asks for and this server cannot do is left out and named, or refused where the setting says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deployments.api import Limits
from tests.deployments.api.dialects.conftest import ASK, TOOLS, WEATHER, Talk
from tests.deployments.support.chat_templates import HERMES, LLAMA3

Make = Callable[..., Talk]
IGNORED, PATH = "x-raydix-ignored-fields", "/v1/chat/completions"
USER = ASK["messages"][0]
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}, "image"),
    ({"type": "input_image", "image_url": "x"}, "image"),
    ({"type": "image", "source": {"type": "base64"}}, "image"),
    ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "audio"),
    ({"type": "audio_url", "audio_url": {"url": "x"}}, "audio"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "video"),
    ({"type": "file", "file": {"file_id": "f"}}, "file"),
    ({"type": "input_file", "file_id": "f"}, "file"),
    ({"type": "document", "source": {}}, "document"),
]


def sent(it: Talk, **change: Any) -> tuple[int, str | None]:
    response = it.client.post(PATH, ASK | change)
    return response.status_code, response.headers.get(IGNORED)


def test_pictures_and_sound_leave_a_text_wherever_they_are(talk: Make) -> None:
    it, strict = talk(HERMES), talk(HERMES, Limits(unknown_fields="refuse"))
    for part, name in PARTS:
        kind, text = part["type"], f"[{name} omitted: this model reads only text]"
        for role, content in (
            ("user", [{"type": "text", "text": "Look:"}, part]),
            ("user", [part, {"type": "text", "text": "Look:"}]),
            ("user", [part]),
            ("tool", [part]),
            ("system", [part]),
            ("assistant", [part]),
        ):
            for messages in (
                [USER, {"role": role, "content": content}],
                [{"role": role, "content": content}, USER],
            ):
                at = f"messages.{messages.index({'role': role, 'content': content})}.content.{content.index(part)}"
                assert sent(it, messages=messages) == (200, f"{at}:{kind}")
                assert it.prompt().count(text) == 1 and it.prompt().count("Look:") == len(content) - 1
        error = strict.refused(messages=[{"role": "user", "content": [part]}])
        assert (error["param"], error["code"]) == ("messages.0.content.0", "unsupported_field")
        assert repr(kind) in error["message"] and "limits.unknown_fields" in error["message"]


def test_the_prompt_of_a_count_has_the_same_text(talk: Make) -> None:
    it = talk(HERMES)
    messages = [{"role": "user", "content": [PARTS[0][0]]}]
    counted = it.client.post("/tokenize", {"model": "demo", "messages": messages})
    assert counted.headers[IGNORED] == "messages.0.content.0:image_url"
    it.whole(messages=messages)
    assert counted.json()["tokens"] == it.engine.requests[-1].prompt_ids


def test_a_long_kind_is_cut_and_breaks_no_header(talk: Make) -> None:
    it = talk(HERMES)
    kind = "x\r\ny: z" + "ü" * 300
    status, ignored = sent(it, messages=[{"role": "user", "content": [{"type": kind}]}])
    assert status == 200 and ignored == f"messages.0.content.0:x??y??z{'?' * 57}"
    assert len(it.prompt()) < 200


@pytest.mark.parametrize(
    "content", [[{"image_url": "x"}], [7], [{"type": 7}], [{"type": "text"}], {"type": "image"}]
)
def test_content_that_is_not_a_part_is_an_error(talk: Make, content: Any) -> None:
    assert talk(HERMES).refused(messages=[{"role": "user", "content": content}])["param"] == "messages.0.content"


@pytest.mark.parametrize("template", [HERMES, LLAMA3, None])
def test_tools_that_this_server_cannot_run_are_left_out_and_named(talk: Make, template: str | None) -> None:
    it, strict = talk(template), talk(template, Limits(unknown_fields="refuse"))
    it.whole(tools=[WEATHER])
    for kind in ("web_search", "web_search_preview_2025_03_11", "mcp", "namespace", "code_interpreter", "later"):
        assert sent(it, tools=[{"type": kind, kind: {}}, WEATHER]) == (200, f"tools.0:{kind}")
        assert it.engine.requests[0].prompt_ids == it.engine.requests[-1].prompt_ids
        assert sent(it, tools=[{"type": kind}]) == (200, f"tools.0:{kind}")
        assert strict.refused(tools=[WEATHER, {"type": kind}])["param"] == "tools.1"
        error = it.refused(tools=[{"type": kind}], tool_choice="required")
        assert error["param"] == "tool_choice" and "cannot run" in error["message"]
        assert it.refused(tools=TOOLS, tool_choice={"type": kind})["param"] == "tool_choice"
        named = [{"type": kind}, {"type": "function", "function": {"name": "get_weather"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
        allowed = "tool_choice.allowed_tools.tools"
        assert sent(it, tools=TOOLS, tool_choice=choice) == (200, f"{allowed}.0:{kind}")
        choice["allowed_tools"] = {"mode": "auto", "tools": named[:1]}
        assert it.refused(tools=TOOLS, tool_choice=choice)["param"] == allowed
    assert sent(it, web_search_options={"search_context_size": "low"}) == (200, "web_search_options")


def test_a_model_without_calls_may_be_sent_tools_that_are_left_out(talk: Make) -> None:
    it = talk(HERMES, tools="none")
    assert sent(it, tools=[{"type": "web_search"}]) == (200, "tools.0:web_search")
    assert it.refused(tools=[WEATHER])["param"] == "tools"


def test_calls_of_such_tools_are_left_out_of_a_conversation(talk: Make) -> None:
    it = talk(HERMES)
    call = {"id": "s", "type": "web_search_call", "action": {}}
    turn = {"role": "assistant", "content": "It rains.", "tool_calls": [call]}
    assert sent(it, messages=[USER, turn, USER]) == (200, "messages.1.tool_calls.0:web_search_call")
    it.whole(messages=[USER, {"role": "assistant", "content": "It rains."}, USER])
    assert it.engine.requests[0].prompt_ids == it.engine.requests[1].prompt_ids
