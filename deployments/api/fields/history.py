"""Takes the messages of a conversation as clients send them, with fields copied from answers, and with labels.

    {"role": "assistant", "content": null, "refusal": null, "parsed": {}, "tool_calls": [{"index": 0, ...}]}
    ─▶ {"role": "assistant", "content": "", "tool_calls": [{...}]}

A client must be able to send an answer back to continue. So the fields that the model reads are taken, under each
of the names that servers use for them, and everything else in a message is omitted. Types are checked afterwards,
by `protocol.Message`.
"""

from __future__ import annotations

from typing import Any

from deployments.api.base.errors import quoted
from deployments.api.dialects.custom import as_function
from deployments.api.fields.content_parts import TEXTS, readable
from deployments.api.fields.ignored import IgnoredFields, keep_known

_OF_ALL = ("role", "content", "name")
_OF_ROLE = {
    "assistant": (*_OF_ALL, "tool_calls", "reasoning"),
    "tool": (*_OF_ALL, "tool_call_id"),
}
_CALL, _CUSTOM = {"id", "type", "custom"}, {"name", "input"}
"""Fields of a call of a custom tool, and of the tool in it."""
KNOWN = frozenset(
    {*_OF_ALL, "tool_calls", "reasoning", "tool_call_id", "function_call", "reasoning_content", "refusal"}
    | {"reasoning_details", "thinking_blocks", "images", "provider_specific_fields", "type"}
)
"""Fields of messages that are read, or repeat those that are; in messages of other roles they have no effect."""
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts of a content, and of `reasoning_details`, that are no part of the answer."""
_PARTS = {**TEXTS, **dict.fromkeys(THOUGHTS, frozenset[str]())}


def taken_messages(messages: list[Any], ignored: IgnoredFields) -> list[Any]:
    """Return messages with the fields that the model reads; values that are no objects stay unchanged. `ignored`
    names omitted fields. Raises `ApiError` 400 where the setting refuses that.
    """
    ids: dict[object, str] = {}  # of calls in OpenAI's older form, by the function's name: its results name no id
    return [
        _taken(message, ids, ignored, f"messages.{index}") if isinstance(message, dict) else message
        for index, message in enumerate(messages)
    ]


def _taken(given: dict[str, Any], ids: dict[object, str], ignored: IgnoredFields, path: str) -> dict[str, Any]:
    given = keep_known(given, KNOWN, {}, ignored, f"{path}.")
    role = given.get("role")
    if role == "function":  # the name of OpenAI's older API
        role, name = "tool", given.get("name")
        given |= {"role": role, "tool_call_id": ids.get(name) if isinstance(name, str) else None}
    elif (
        role == "assistant"
        and isinstance(call := given.get("function_call"), dict)
        and not given.get("tool_calls")
    ):
        name = f"call_{path.removeprefix('messages.')}"
        given["tool_calls"] = [{"id": name, "function": call}]
        if isinstance(called := call.get("name"), str):
            ids[called] = name
    fields = _OF_ROLE.get(role, _OF_ALL) if isinstance(role, str) else _OF_ALL
    taken = {name: value for name in fields if (value := given.get(name)) is not None}
    if "content" in taken:
        kinds = _PARTS if role == "assistant" else TEXTS
        taken["content"] = readable(taken["content"], ignored, f"{path}.content", kinds)
    if isinstance(calls := taken.get("tool_calls"), list):
        taken["tool_calls"] = _taken_calls(calls, ignored, f"{path}.tool_calls")
    if role == "assistant":
        _add_answer(taken, given)
    elif role == "tool" and "content" in given:
        taken.setdefault("content", "")  # the function returned nothing
    return taken


def _taken_calls(calls: list[Any], ignored: IgnoredFields, path: str) -> list[Any]:
    """Return calls as calls of functions, without those of tools that other servers run."""
    taken = []
    for index, call in enumerate(calls):
        kind, where = call.get("type") if isinstance(call, dict) else None, f"{path}.{index}"
        if kind == "custom":
            call = keep_known(call, _CALL, {}, ignored, f"{where}.")
            custom = call.get("custom")
            if isinstance(custom, dict):
                custom = as_function(keep_known(custom, _CUSTOM, {}, ignored, f"{where}.custom."))
            call = {"id": call.get("id"), "function": custom}
        elif isinstance(kind, str) and kind != "function":
            ignored.leave_out(where, kind, f"is a call of the type {quoted(kind)}, which this server cannot use")
            continue
        taken.append(call)
    return taken


def _add_answer(taken: dict[str, Any], given: dict[str, Any]) -> None:
    """Add fields that an assistant's message has under other names, or in its parts."""
    details = _objects(given.get("reasoning_details"))
    if isinstance(content := taken.get("content"), list):
        details += [part for part in _objects(content) if part.get("type") in THOUGHTS]
        taken["content"] = [part for part in content if part not in details] or ""
    if "reasoning" not in taken:
        reasoning = given.get("reasoning_content")
        reasoning = _texts(details) if reasoning is None or reasoning == "" else reasoning
        if reasoning != "":
            taken["reasoning"] = reasoning
    if "content" not in taken:
        refusal = given.get("refusal")
        taken["content"] = refusal if isinstance(refusal, str) else ""


def _objects(given: object) -> list[dict[str, Any]]:
    return [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []


def _texts(details: list[dict[str, Any]]) -> str:
    """Return the readable part of an answer's reasoning; some of it may be encrypted."""
    texts = (detail.get("thinking") or detail.get("text") for detail in details)
    return "\n".join(text for text in texts if isinstance(text, str))
