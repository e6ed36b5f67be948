"""What /openapi.json says of objects within bodies is what the server does, whatever it does with unknown ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deployments.api import Limits, TextCodec
from tests.deployments.support.described_api import Api
from tests.deployments.support.nested_bodies import BODIES, places, sent, with_unknown

CHAT, TOKENIZE, MESSAGES, RESPONSES = "/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/responses"
INPUT_TOKENS, CONVERSATIONS = f"{RESPONSES}/input_tokens", "/v1/conversations"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f"}}
CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}
TEXT, REFUSAL = {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "a"}
OTHER = {"type": "of_another_server", "x": 7}
THOUGHT = {"type": "thinking", "thinking": "a"}
PARTS: list[Any] = [
    [TEXT], [REFUSAL], [OTHER], [THOUGHT], [TEXT, OTHER], [{**TEXT, "cache_control": {}}], [{**TEXT, "x": 7}],
    [{"type": "text"}], [{"type": "input_text", "text": None}], [{"type": "refusal", "text": "a"}], [{"type": 7}],
    [{}], [{"text": "a"}], ["a"], [], "", 7, None,
]  # fmt: skip
CALLS: list[Any] = [
    [CALL], [CUSTOM], [OTHER], [{**CALL, "type": None}], [{**CALL, "index": 0}], [{**CALL, "x": 7}],
    [{**CUSTOM, "x": 7}], [{**CUSTOM, "custom": {"name": "f", "input": None, "x": 7}}], [{"type": "custom"}],
    [{**CUSTOM, "custom": {"input": "x"}}], [{"type": "function"}], [{**CALL, "type": 7}], [7], [], None, 7,
]  # fmt: skip
OLDER: list[Any] = [{"name": "f", "arguments": "{}"}, {"name": "f", "x": 7}, {"arguments": "{}"}, None, "auto"]
GRAMMAR = {"definition": "start: /a/", "syntax": "lark"}
FORMATS: list[Any] = [
    {"type": "text"}, {"type": "grammar"}, {"type": "grammar", "grammar": GRAMMAR}, {"type": "text", **GRAMMAR},
    {"type": "text", "grammar": GRAMMAR}, {"type": "grammar", **GRAMMAR}, {"type": 7}, {}, None, 7,
]  # fmt: skip
TEXTS: list[Any] = ["a", [], [{**TEXT, "x": 7}], [TEXT, OTHER], [{"type": "text"}], 7]
SOURCES: list[Any] = [
    *({"type": "text", "data": text} for text in TEXTS), *({"type": "content", "content": text} for text in TEXTS),
    {"type": "text", "content": "a"}, {"type": "base64", "data": "a"}, {"content": "a", "x": 7}, {"data": "a"},
    {"type": 7, "content": "a"}, {}, 7,
]  # fmt: skip
READ: list[dict[str, Any]] = [
    *({"type": "search_result", "content": text, "x": 7} for text in TEXTS),
    *({"type": "tool_reference", "tool_name": text} for text in TEXTS),
    *({"type": "document", "source": source, "title": "a"} for source in SOURCES),
    {"type": "document"}, {"type": "search_result"}, {"type": "tool_reference"},
]  # fmt: skip
TOOLS: list[Any] = [OTHER, {"type": "namespace"}, {"type": "function"}, {"type": 7}, {}, 7]
ITEMS: list[Any] = [
    {"type": "of_another_server", "id": 7}, {"id": None}, {"type": 7}, {}, 7, {**USER, "id": 7}, {"role": "user"},
    {"role": "wizard", "content": "a"}, {"role": "assistant"}, {"role": "assistant", "content": []},
    {"id": "a", "role": "wizard"}, {**USER, "type": "message", "status": "completed"}, {**USER, "x": 7},
    {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": None},
    {"type": "function_call", "call_id": "c", "name": "f", "namespace": 7}, {"type": "function_call", "name": "f"},
    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": {}},
    {"type": "custom_tool_call_output", "call_id": "c", "output": [TEXT, OTHER]},
    {"type": "function_call_output", "output": "a"}, {"type": "function_call_output", "call_id": "c"},
    {"type": "reasoning"}, {"type": "reasoning", "summary": [{"text": "a", "x": 7}], "content": None},
    {"type": "reasoning", "summary": [{}]}, {"type": "reasoning", "encrypted_content": "x"},
]  # fmt: skip


def tried() -> list[tuple[str, dict[str, Any]]]:
    bodies = [(path, sent(body)) for path, body in BODIES]
    bodies += [(path, with_unknown(body, place, 7)) for path, body in bodies for place in places(body)]
    bodies += [
        (path, with_unknown(body, place, [])) for path, body in bodies[: len(BODIES)] for place in places(body)
    ]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": content}
        for content in PARTS
        for role in ("user", "system", "developer", "assistant", "tool", "function")
    ]
    messages += [{"role": "assistant", "tool_calls": calls} for calls in CALLS]
    messages += [{"role": "assistant", "function_call": call} for call in OLDER]
    messages += [{"role": "assistant", "function_call": call, "tool_calls": calls}
                 for call in OLDER for calls in (None, [], [CALL])]  # fmt: skip
    messages += [
        {**USER, name: 7} for name in ("tool_calls", "refusal", "reasoning", "images", "name", "status", "x")
    ]
    messages += [{"role": role, "content": "a", "tool_call_id": 7} for role in ("tool", "function")]
    bodies += [(path, {"messages": [USER, message, USER]}) for path in (CHAT, TOKENIZE) for message in messages]
    customs = [{"type": "custom", "custom": {"name": "f", "format": form}} for form in FORMATS]
    bodies += [(path, {"messages": [USER], "tools": [tool]})
               for path in (CHAT, TOKENIZE) for tool in (*TOOLS, *customs)]  # fmt: skip
    flat = [*TOOLS, *({"type": "custom", "name": "f", "format": form} for form in FORMATS)]
    flat += [{"type": "namespace", "name": "n", "tools": [tool]} for tool in flat]
    bodies += [(path, {"input": "a", "tools": [tool]}) for path in (RESPONSES, INPUT_TOKENS) for tool in flat]
    items = [*ITEMS, *({"role": role, "content": content} for role in ("user", "assistant") for content in PARTS)]
    items += [{"type": "function_call_output", "call_id": "c", "output": output} for output in PARTS]
    bodies += [(path, {"input": [USER, item, USER]}) for path in (RESPONSES, INPUT_TOKENS) for item in items]
    bodies += [(path, {"items": [item]}) for item in items for path in (CONVERSATIONS, ADDED)]
    blocks: list[Any] = [
        TEXT,
        OTHER,
        THOUGHT,
        {"type": "text"},
        {"type": "input_text", "text": "a"},
        {"type": 7},
        {},
        7,
        *READ,
    ]
    of_claude: list[dict[str, Any]] = [{"system": [block]} for block in blocks]
    of_claude += [{"messages": [{"role": role, "content": [block]}, USER]}
                  for block in blocks for role in ("user", "assistant")]  # fmt: skip
    of_claude += [{"messages": [USER, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [block]}]}]} for block in blocks]  # fmt: skip
    tools: list[dict[str, Any]] = [OTHER, {"type": "custom"}, {"input_schema": {}}]
    of_claude += [{"tools": [{"name": "f", **tool}]} for tool in tools]
    of_claude += [
        {"thinking": {"type": "enabled", "budget_tokens": tokens}} for tokens in (0, 1, 2**31 - 1, 2**31)
    ]
    of_claude += [{"tool_choice": choice} for choice in ({"type": "tool"}, {"type": "auto", "name": None})]
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        bodies += [(path, {"messages": [USER], "max_tokens": 9, **body}) for body in of_claude]
    return bodies


ADDED = f"{CONVERSATIONS}/{{conversation_id}}/items"


@pytest.mark.parametrize("rule", ["warn", "refuse"])
def test_objects_are_accepted_where_the_document_allows_them(codec: TextCodec, tmp_path: Path, rule: str) -> None:
    api = Api(codec, tmp_path, Limits(unknown_fields=rule))  # type: ignore[arg-type]
    validators = {
        path: jsonschema.Draft202012Validator({**api.schema(path), "components": api.document["components"]})
        for path in {path for path, _ in tried()}
    }
    for path, body in tried():
        answer = api.post(path, body)
        whole = {**body, **({"model": "demo"} if "model" in api.schema(path)["properties"] else {})}
        if path == TOKENIZE:
            whole, answer = body, api.client.post(path, body)
        assert validators[path].is_valid(whole) == (answer.status_code == 200), (path, body, answer.text)
