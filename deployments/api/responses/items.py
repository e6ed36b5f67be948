"""Takes the items of a conversation as clients send them, and gives each the form in which it is kept and listed.

    "hi"                                     {"id": "msg_…", "type": "message", "status": "completed",
    {"role": "user", "content": "hi"}    ─▶   "role": "user", "content": [{"type": "input_text", "text": "hi"}]}

Items that this server has sent are always accepted. Fields that the model reads are kept, labels are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from deployments.api.base.errors import ApiError, invalid, quoted
from deployments.api.base.field_checks import at_most
from deployments.api.fields.content_parts import TEXT_OF, readable
from deployments.api.fields.ignored import IgnoredFields, keep_known
from deployments.api.responses.ids import input_id
from deployments.api.responses.tools import shown_name
from deployments.config.limits import Limits

Item = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_LABELS = {"type", "id"}
KNOWN: Mapping[str, Set[str]] = {
    "message": {"role", "content"} | _LABELS,
    "function_call": {"call_id", "name", "namespace", "arguments"} | _LABELS,
    "function_call_output": {"call_id", "output"} | _LABELS,
    "custom_tool_call": {"call_id", "name", "namespace", "input"} | _LABELS,
    "custom_tool_call_output": {"call_id", "output"} | _LABELS,
    "reasoning": {"summary", "content"} | _LABELS,
    "item_reference": _LABELS,
}
"""The fields of items that are read, by the items' type."""
_CALLS = {"function_call": ("arguments", "{}"), "custom_tool_call": ("input", "")}
"""The field with a call's input, by the type of the call, and its default."""
_LEFT_OUT: Item = {"type": "left out"}
"""Replaces an omitted item, so that errors number all items as the client does."""


def usable_items(given: object, ignored: IgnoredFields, where: str = "input") -> object:
    """Return the items of the field `where` with only the fields that the model reads; any value but an array of
    items stays unchanged. `ignored` names omitted fields. Raises `ApiError` 400 if the setting refuses them.
    """
    if not isinstance(given, list):
        return given
    return [_usable(item, ignored, f"{where}.{index}") for index, item in enumerate(given)]


def _usable(item: object, ignored: IgnoredFields, path: str) -> object:
    kind = _kind(item)
    if not isinstance(item, dict) or kind is None:
        return item
    if kind not in KNOWN:
        reason = f"is an item of the type {quoted(kind)}, which this server cannot use"
        ignored.leave_out(path, kind, reason)
        return _LEFT_OUT
    known = keep_known(item, KNOWN[kind], {}, ignored, f"{path}.")
    for field in ("content", "output") if kind != "reasoning" else ():
        if field in known:
            known[field] = readable(known[field], ignored, f"{path}.{field}")
    return known


def references(given: object) -> list[str]:
    """Return the names of items that `input` only refers to."""
    items = given if isinstance(given, list) else []
    return [item["id"] for item in items if _kind(item) == "item_reference" and isinstance(item.get("id"), str)]


def taken_items(
    given: str | Sequence[Any],
    limits: Limits,
    response: str,
    known: Mapping[str, Item] | None = None,
    where: str = "input",
) -> list[Item]:
    """Return the items of a response's `input`, or of the field `where`. Raises `ApiError` 400 that names the
    field at fault, and 404 for a reference to an item that is not in `known`.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise invalid(f"{where} is empty; it needs a text or at least one item.", where)
    at_most(limits, "max_messages", where, len(given), "items")
    return [
        _taken(item, f"{where}.{index}", limits, response, index, known or {})
        for index, item in enumerate(given)
        if item is not _LEFT_OUT
    ]


def _taken(item: Any, path: str, limits: Limits, response: str, index: int, known: Mapping[str, Item]) -> Item:
    kind = _kind(item)
    if kind is None:
        raise invalid(f"{path} must be an object with a role or a type.", path)
    if kind == "item_reference":
        return _referred(item, path, known)
    name = _text(item, "id", path, default=input_id(_PREFIXES[kind], response, index))
    base = {"id": name, "type": kind, "status": "completed"}
    if kind == "message":
        return base | _message(item, path, limits)
    if kind == "reasoning":
        return base | _reasoning(item, path, limits)
    base["call_id"] = _text(item, "call_id", path)
    if kind in _CALLS:
        field, empty = _CALLS[kind]
        base |= {"name": _text(item, "name", path), field: _text(item, field, path, default=empty)}
        return base | ({} if item.get("namespace") is None else {"namespace": _text(item, "namespace", path)})
    return base | {"output": _output(item, path, limits)}


def _kind(item: object) -> str | None:
    """Return the type of an item; some clients send only the role, or only the id. None: unknown."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    return kind if isinstance(kind, str) else None


def _referred(item: Item, path: str, known: Mapping[str, Item]) -> Item:
    name = _text(item, "id", path)
    if name not in known:
        raise ApiError(
            404,
            f"{path}.id refers to the item {quoted(name)}, which no stored response has; send the item itself.",
            param=f"{path}.id",
        )
    return known[name]


def _message(item: Item, path: str, limits: Limits) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(_ROLES)}, got {quoted(role)}.", f"{path}.role")
    content = item.get("content")
    if role == "assistant" and content in (None, []):
        content = ""  # an answer without text
    form = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": _parts(content, f"{path}.content", limits, form)}


def _parts(content: object, path: str, limits: Limits, form: str) -> list[Item]:
    """Return a content's parts, in the type that texts of this place have."""
    if isinstance(content, str):
        return [_part(form, content)]
    if not isinstance(content, list) or not content:
        raise invalid(f"{path} must be a string or a non-empty array of text parts.", path)
    at_most(limits, "max_content_parts", path, len(content), "parts")
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXT_OF[kind]) if isinstance(kind, str) and kind in TEXT_OF else None
        if not isinstance(text, str):
            raise invalid(
                f'{path}.{index} must have the form {{"type": "{form}", "text": "..."}}.', f"{path}.{index}"
            )
        parts.append(_part("refusal" if kind == "refusal" else form, text))
    return parts


def _part(form: str, text: str) -> Item:
    if form == "refusal":
        return {"type": form, "refusal": text}
    return {"type": form, "text": text} | ({"annotations": []} if form == "output_text" else {})


def _output(item: Item, path: str, limits: Limits) -> str | list[Item]:
    output = item.get("output")
    if output is None or output == []:
        return ""  # the function returned nothing
    return output if isinstance(output, str) else _parts(output, f"{path}.output", limits, "input_text")


def _reasoning(item: Item, path: str, limits: Limits) -> Item:
    kept: Item = {}
    for name, form in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = [] if item.get(name) is None else item[name]
        listed = parts if isinstance(parts, list) else [None]
        texts = [part.get("text") if isinstance(part, dict) else None for part in listed]
        if not all(isinstance(text, str) for text in texts):
            raise invalid(
                f'{path}.{name} must be an array of {{"type": "{form}", "text": "..."}}.', f"{path}.{name}"
            )
        at_most(limits, "max_content_parts", f"{path}.{name}", len(texts), "parts")
        kept[name] = [{"type": form, "text": text} for text in texts]
    return kept


def _text(item: Item, name: str, path: str, default: str | None = None) -> str:
    value = item.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        problem = "is required" if value is None else f"must be a string, got {quoted(value)}"
        raise invalid(f"{path}.{name} {problem}.", f"{path}.{name}")
    return value


# --- as messages -----------------------------------------------------------------------------------------------


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return a conversation's messages. The assistant's thoughts, text and calls of one turn are one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that further items belong to
    for item in items:
        kind = item["type"]
        if "output" in item or (kind == "message" and item["role"] != "assistant"):
            messages.append(_said(item))
            turn = None
            continue
        if turn is None or _begins_another(turn, item):
            turn = {"role": "assistant", "content": "", "tool_calls": []}
            messages.append(turn)
        _add(turn, item)
    return messages


def _said(item: Item) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": item["content"]}
    return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}


def _begins_another(turn: dict[str, Any], item: Item) -> bool:
    """Whether an item does not belong to the turn: reasoning comes first, and only calls stand between texts."""
    if item["type"] == "reasoning":
        return True
    return item["type"] == "message" and bool(turn["content"]) and not turn["tool_calls"]


def _add(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] += "\n".join(part.get("text", part.get("refusal", "")) for part in item["content"])
    elif item["type"] == "reasoning":
        parts = item["content"] or item["summary"]
        turn["reasoning"] = "\n".join(part["text"] for part in parts)
    else:
        kind, field = ("custom", "input") if item["type"] == "custom_tool_call" else ("function", "arguments")
        called = {"name": shown_name(item["name"], item.get("namespace")), field: item[field]}
        turn["tool_calls"].append({"id": item["call_id"], "type": kind, kind: called})
