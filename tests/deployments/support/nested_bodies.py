"""Bodies that have every object which requests may have, and ways to put an unknown field into each of these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {}}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CUSTOM = {"type": "custom", "custom": {"name": "g", "format": {"type": "text"}}}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]},
                         {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]}]}),
    (CHAT, {"messages": [USER], "tools": [FUNCTION, CUSTOM],
            "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    (CHAT, {"messages": [USER], "tools": [FUNCTION, CUSTOM],
            "tool_choice": {"type": "custom", "custom": {"name": "g"}}}),
    (CHAT, {"messages": [USER], "tools": [FUNCTION, CUSTOM], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}]}}}),
    (CHAT, {"messages": [USER], "functions": [FUNCTION["function"]], "function_call": {"name": "f"}}),
    (CHAT, {"messages": [USER], **STREAMED}),
    (CHAT, {"messages": [USER], "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
    (CHAT, {"messages": [USER], "response_format": {"type": "structural_tag", "triggers": ["<a"], "structures": [
        {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]}}),
    (CHAT, {"messages": [USER], "response_format": {"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<a"], "tags": [
            {"begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}]}}}),
    (CHAT, {"messages": [USER], "structured_outputs": {"structural_tag": {
        "type": "structural_tag", "triggers": ["<a"], "structures": [
            {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]}}}),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "a"}, **STREAMED}),
    ("/tokenize", {"messages": [USER], "tools": [FUNCTION]}),
    (MESSAGES, {"max_tokens": 9, "system": [{"type": "text", "text": "a"}],
                "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
                "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"},
                "messages": [USER, {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "?"}, {"type": "redacted_thinking"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [USER["content"][0]]}]}]}),
    (MESSAGES, {"max_tokens": 9, "messages": [USER], "output_format": {"type": "json_schema", "schema": SCHEMA}}),
    (f"{MESSAGES}/count_tokens", {"messages": [USER], "output_config": {"format": {
        "type": "json_schema", "schema": SCHEMA}}}),
    (RESPONSES, {"input": [
        USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "reasoning", "summary": []}, {"type": "function_call", "call_id": "c", "name": "f"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "1"}, USER]}),
    (RESPONSES, {"input": [USER], "tools": [FLAT, {"type": "custom", "name": "g", "format": {"type": "text"}},
                  {"type": "namespace", "name": "n", "tools": [FLAT, {"type": "custom", "name": "g"}]}]}),
    (RESPONSES, {"input": "hi", "reasoning": {"effort": "low"}, "text": {"verbosity": "low", "format": FORMAT}}),
    (f"{RESPONSES}/input_tokens", {"input": "hi", "reasoning": {}, "text": {"format": {"type": "text"}}}),
    ("/v1/conversations", {"items": [USER]}),
]  # fmt: skip
FREE = {"parameters", "schema", "input_schema", "json_schema", "input"}
"""Objects in which the client may have any field. `json_schema` is one only where it is within a `content`."""


def places(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the objects in a body, itself left out."""
    if isinstance(value, dict):
        for name, child in value.items():
            is_free = isinstance(child, dict) and name in FREE and not path.endswith("response_format.")
            if not is_free:
                if isinstance(child, dict):
                    yield path + name
                yield from places(child, f"{path}{name}.")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            if isinstance(child, dict):
                yield f"{path}{index}"
            yield from places(child, f"{path}{index}.")


def sent(body: dict[str, Any]) -> dict[str, Any]:
    return body if "items" in body else {"model": "demo", **body}


def with_unknown(body: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(body))
    at: Any = changed
    for part in place.split("."):
        at = at[int(part) if isinstance(at, list) else part]
    at["unheard_of"] = value
    return changed
