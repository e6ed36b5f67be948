"""Takes the messages of a conversation as clients send them: with what they kept of answers, and with labels.

    {"role": "assistant", "content": null, "refusal": null, "parsed": {}, "tool_calls": [{"index": 0, ...}]}
    ─▶ {"role": "assistant", "content": "", "tool_calls": [{...}]}

A client that cannot send back what it got cannot go on. So what the model is to read is taken, under each of the
names that servers use for it, and everything else in a message is left out. Types are checked afterwards, by
`protocol.Message`.
"""

from __future__ import annotations

from typing import Any

_OF_ALL = ("role", "content", "name")
_OF_ROLE = {
    "assistant": (*_OF_ALL, "tool_calls", "reasoning"),
    "tool": (*_OF_ALL, "tool_call_id"),
}
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts of a content, and of `reasoning_details`, that are no part of the answer."""


def taken_messages(messages: list[Any]) -> list[Any]:
    """Return messages with what the model is to read of them; what is no object stays as it is."""
    return [_taken(message) if isinstance(message, dict) else message for message in messages]


def _taken(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("role") == "function":  # the name of OpenAI's older API
        given = {**given, "role": "tool"}
    role = given.get("role")
    fields = _OF_ROLE.get(role, _OF_ALL) if isinstance(role, str) else _OF_ALL
    taken = {name: value for name in fields if (value := given.get(name)) is not None}
    if role == "assistant":
        _add_answer(taken, given)
    elif role == "tool" and "content" in given:
        taken.setdefault("content", "")  # the function returned nothing
    return taken


def _add_answer(taken: dict[str, Any], given: dict[str, Any]) -> None:
    """Add what an assistant's message has under other names, or in its parts."""
    details = _objects(given.get("reasoning_details"))
    if isinstance(content := taken.get("content"), list):
        details += [part for part in _objects(content) if part.get("type") in THOUGHTS]
        taken["content"] = [part for part in content if part not in details] or ""
    if "reasoning" not in taken:
        reasoning = given.get("reasoning_content")
        reasoning = _texts(details) if reasoning is None or reasoning == "" else reasoning
        if reasoning != "":
            taken["reasoning"] = reasoning
    if "tool_calls" not in taken and isinstance(call := given.get("function_call"), dict):
        taken["tool_calls"] = [{"function": call}]
    if "content" not in taken:
        refusal = given.get("refusal")
        taken["content"] = refusal if isinstance(refusal, str) else ""


def _objects(given: object) -> list[dict[str, Any]]:
    return [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []


def _texts(details: list[dict[str, Any]]) -> str:
    """Return what is readable of an answer's reasoning; some of it may be encrypted."""
    texts = (detail.get("thinking") or detail.get("text") for detail in details)
    return "\n".join(text for text in texts if isinstance(text, str))
