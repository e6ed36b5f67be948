"""The tools of agents such as Codex: custom ones, namespaces, and those that this server cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deployments.api import Limits
from tests.deployments.api.dialects.conftest import takes
from tests.deployments.api.responses.conftest import ASK, CLOCK, WEATHER, Responses
from tests.deployments.support.chat_templates import HERMES

Make = Callable[..., Responses]
IGNORED = "x-raydix-ignored-fields"
PATCH = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [CLOCK, PATCH]}
TEXT = '*** Begin Patch\n+say("é")\n*** End Patch'
USER = {"role": "user", "content": [{"type": "input_text", "text": "Patch it."}]}
CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", **USER},
    ],
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}},
        {**PATCH, "format": LARK},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
        FILES,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "conversation-7",
    "client_metadata": {"turn": "3"},
    "text": {"verbosity": "medium"},
}  # fmt: skip
LEFT_OUT = [
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "computer_use_preview", "computer", "mcp", "image_generation", "local_shell", "shell",
    "apply_patch", "tool_search", "programmatic_tool_calling", "of-the-future",
]  # fmt: skip
LEFT_OUT_ITEMS = [
    "web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call",
    "image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
    "apply_patch_call", "apply_patch_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response", "tool_search_call", "tool_search_output", "additional_tools", "compaction",
    "of-the-future",
]  # fmt: skip


def called(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def spelled(name: str, **arguments: Any) -> str:
    """A call as the template shows it."""
    return called(name, **arguments).replace("\n", "")


def names(response: Any) -> list[str]:
    return [name for name in response.headers.get(IGNORED, "").split(", ") if name]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_request_of_codex_is_answered(ask: Make, chunk: int) -> None:
    it = ask(HERMES)
    it.engine.chunk, it.engine.says = chunk, called("apply_patch", input=TEXT)
    response = it.client.post("/v1/responses", ASK | CODEX)
    assert response.status_code == 200, response.text
    assert names(response) == ["tools.1.format:grammar", "tools.2:web_search", "tools.3:image_generation"]
    (item,) = response.json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", TEXT)
    assert item["id"].startswith("ctc_") and item["call_id"].startswith("call_") and item["status"] == "completed"
    prompt = it.talk.prompt()
    assert "apply_patch" in prompt and "mcp__files__clock" in prompt and "*** Begin Patch" in prompt
    assert "web_search" not in prompt and "image_generation" not in prompt

    events = it.events(**CODEX)
    kinds = [event["type"] for event in events]
    assert kinds.count("response.custom_tool_call_input.done") == 1
    assert "response.function_call_arguments.delta" not in kinds
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == TEXT
    (done,) = (event for event in events if event["type"] == "response.custom_tool_call_input.done")
    (added,) = (event for event in events if event["type"] == "response.output_item.added")
    assert (done["input"], done["item_id"], added["item"]["input"]) == (TEXT, added["item"]["id"], "")
    known = {name: value for name, value in CODEX.items() if name != "client_metadata"}
    streamed = it.streamed(**known, extra_body={"client_metadata": CODEX["client_metadata"]}).output[0]
    assert (streamed.type, streamed.input) == ("custom_tool_call", TEXT)


def test_the_turn_is_sent_back_unchanged(ask: Make) -> None:
    it = ask(HERMES)
    it.engine.says = called("apply_patch", input=TEXT)
    output = it.whole(**CODEX)["output"]
    for result in ("Done.", [{"type": "input_text", "text": "Done."}]):
        back = {"type": "custom_tool_call_output", "call_id": output[0]["call_id"], "output": result}
        response = it.client.post("/v1/responses", ASK | CODEX | {"input": [*CODEX["input"], *output, back]})
        assert response.status_code == 200 and not [name for name in names(response) if "input" in name]
        assert spelled("apply_patch", input=TEXT) in it.talk.prompt() and "Done." in it.talk.prompt()


def test_stored_responses_can_be_continued_and_show_their_tools_as_they_were_given(ask: Make) -> None:
    it = ask(HERMES)
    it.engine.says = called("mcp__files__apply_patch", input="a")
    tools = [*CODEX["tools"], WEATHER]
    first = it.whole(**CODEX | {"store": True, "tools": tools})
    kept = it.client.get(f"/v1/responses/{first['id']}").json()
    assert kept["tools"] == first["tools"]
    assert kept["tools"][1:5] == tools[1:5]
    assert [tool["strict"] for tool in (kept["tools"][0], kept["tools"][5])] == [False, False]
    call = first["output"][0]
    assert (call["namespace"], call["name"], call["type"]) == ("mcp__files", "apply_patch", "custom_tool_call")
    back = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    it.whole(input=[back], previous_response_id=first["id"], tools=tools)
    assert spelled("mcp__files__apply_patch", input="a") in it.talk.prompt()
    it.whole(input=[*CODEX["input"], {"type": "item_reference", "id": call["id"]}, back], tools=tools)
    assert spelled("mcp__files__apply_patch", input="a") in it.talk.prompt()


def test_tools_that_this_server_cannot_run_are_left_out_and_named(ask: Make) -> None:
    it, silent = ask(HERMES), ask(HERMES, Limits(unknown_fields="ignore"))
    it.whole(tools=[WEATHER])
    for kind in LEFT_OUT:
        tool = {"type": kind, "any": {"field": [1]}}
        response = it.post(tools=[tool, WEATHER])
        assert response.status_code == 200 and names(response) == [f"tools.0:{kind}"]
        assert it.engine.requests[0].prompt_ids == it.engine.requests[-1].prompt_ids
        assert response.json()["tools"][0] == tool
        assert it.post(tools=[tool]).status_code == 200  # and without others, there are no tools
        for choice in ("required", {"type": kind}):
            error = it.refused(tools=[tool], tool_choice=choice)
            assert error["param"] == "tool_choice" and len(error["message"]) < 300
        assert IGNORED not in silent.post(tools=[tool]).headers


def test_items_of_such_tools_are_left_out_and_named(ask: Make) -> None:
    it = ask(HERMES)
    it.whole(input=[USER, USER])
    for kind in LEFT_OUT_ITEMS:
        item = {"type": kind, "id": "x_1", "call_id": "c", "status": "completed", "action": {"type": "search"}}
        response = it.post(input=[USER, item, USER])
        assert response.status_code == 200 and names(response) == [f"input.1:{kind}"]
        assert it.engine.requests[0].prompt_ids == it.engine.requests[-1].prompt_ids
        stored = it.client.post("/v1/conversations", {"items": [USER, item]})
        assert stored.status_code == 200 and stored.headers[IGNORED] == f"items.1:{kind}"
        path = f"/v1/conversations/{stored.json()['id']}/items"
        nothing = it.client.post(path, {"items": [item]}).json()
        assert (nothing["data"], nothing["first_id"], nothing["last_id"]) == ([], None, None)
        added = it.client.post(path, {"items": [item, USER]})
        assert len(added.json()["data"]) == 1 and added.headers[IGNORED] == f"items.0:{kind}"


def test_the_setting_refuses_them(ask: Make) -> None:
    it = ask(HERMES, Limits(unknown_fields="refuse"))
    for kind in LEFT_OUT:
        error = it.refused(tools=[WEATHER, {"type": kind}])
        assert (error["param"], error["code"]) == ("tools.1", "unsupported_field")
        assert repr(kind) in error["message"] and "limits.unknown_fields" in error["message"]
    for kind in LEFT_OUT_ITEMS:
        assert it.refused(input=[USER, {"type": kind}])["param"] == "input.1"
    error = it.refused(tools=[{**PATCH, "format": LARK}])
    assert error["param"] == "tools.0.format" and "shown to the model but not enforced" in error["message"]


def test_reasoning_that_only_another_server_can_read_is_named(ask: Make) -> None:
    it = ask(HERMES)
    for secret, named in (("gAAA", ["input.1.encrypted_content"]), (None, [])):
        thought = {"type": "reasoning", "id": "rs_1", "content": None, "encrypted_content": secret}
        assert names(it.post(input=[USER, {**thought, "summary": []}, USER])) == named


@pytest.mark.parametrize(
    ("namespace", "shown"), [("crm", "crm__clock"), ("mcp__crm__", "mcp__crm__clock"), ("a-b", "a-b__clock")]
)
def test_functions_in_a_namespace_are_called_by_both_names(ask: Make, namespace: str, shown: str) -> None:
    it = ask(HERMES)
    group = {"type": "namespace", "name": namespace, "description": "Customers.", "tools": [CLOCK, WEATHER]}
    it.engine.says = called(shown)
    (item,) = it.whole(tools=[group])["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "clock", namespace)
    assert shown in it.talk.prompt() and it.talk.prompt().count("Customers.") == 1
    for event in it.events(tools=[group]):
        item_of = event.get("item", {})
        assert item_of.get("namespace", namespace) == namespace and item_of.get("name", "clock") == "clock"
    back = {"type": "function_call_output", "call_id": item["call_id"], "output": "12:00"}
    it.whole(input=[USER, item, back], tools=[group])
    assert spelled(shown) in it.talk.prompt()


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "clock", "namespace": "crm"},
        {"type": "function", "name": "clock"},
        {"type": "function", "name": "crm__clock"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "mcp", "server_label": "x"}, {"type": "function", "name": "clock"}]},
    ],
)  # fmt: skip
def test_a_choice_may_name_them_too(ask: Make, choice: dict[str, Any]) -> None:
    it = ask(HERMES)
    it.engine.says = called("crm__clock")
    group = {"type": "namespace", "name": "crm", "tools": [CLOCK]}
    response = it.post(tools=[WEATHER, group], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert names(response) == (["tool_choice.tools.0:mcp"] if len(choice.get("tools", ())) == 2 else [])
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None and takes(grammar, called("crm__clock"))
    assert not takes(grammar, called("get_weather", city="Oslo"))


def test_a_custom_tool_may_be_chosen(ask: Make) -> None:
    it = ask(HERMES)
    it.engine.says = called("apply_patch", input="a")
    response = it.whole(tools=[CLOCK, PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    assert response["output"][0]["input"] == "a"
    assert response["tool_choice"] == {"type": "custom", "name": "apply_patch"}
    assert it.refused(tools=[CLOCK], tool_choice={"type": "custom", "name": "g"})["param"] == "tool_choice.name"


def test_a_name_that_stands_for_two_tools_is_refused(ask: Make) -> None:
    flat = {**CLOCK, "name": "crm__clock"}
    error = ask(HERMES).refused(tools=[flat, {"type": "namespace", "name": "crm", "tools": [CLOCK]}])
    assert error["param"] == "tools.1.tools.0.name" and "names must differ" in error["message"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_image", "image_url": "data:image/png;base64,iVBO"}, "[image omitted: this model reads"),
        ({"type": "input_file", "file_id": "file_1"}, "[file omitted: this model reads only text]"),
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "[audio omitted: this model"),
        ({"type": "computer_screenshot", "image_url": "x"}, "[computer_screenshot omitted: this model reads"),
    ],
)
def test_pictures_files_and_sound_leave_a_text(ask: Make, part: dict[str, Any], text: str) -> None:
    it = ask(HERMES)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for form in ("function_call_output", "custom_tool_call_output"):
        result = {"type": form, "call_id": "c", "output": [part]}
        given = [call, result, {"role": "user", "content": [USER["content"][0], part]}]
        response = it.post(input=given)
        assert response.status_code == 200, response.text
        kind = part["type"]
        assert names(response) == [f"input.1.output.0:{kind}", f"input.2.content.1:{kind}"]
        assert it.talk.prompt().count(text) == 2
        strict = ask(HERMES, Limits(unknown_fields="refuse"))
        assert strict.refused(input=given)["param"] == "input.1.output.0"
