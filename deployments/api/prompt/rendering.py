"""Renders conversations with tools for chat templates: as objects, or as text if a template has no tools."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deployments.api.base import exact_json
from deployments.api.base.field_checks import is_deeper
from deployments.api.dialects.named import object_of
from deployments.api.dialects.tool_format import ToolFormat
from deployments.api.fields.tools import Function, ToolCall

if TYPE_CHECKING:
    from deployments.api.fields.protocol import Message

_SHORT_ID = 9
Plain = dict[str, Any]
"""A message or a tool as the template gets it."""


def plain_tools(functions: Sequence[Function]) -> list[Plain]:
    """Return tools as Hugging Face's templates expect them."""
    return [{"type": "function", "function": _plain_function(function)} for function in functions]


def plain_messages(
    messages: Sequence[Message],
    max_depth: int,
    *,
    wraps_text: bool = False,
    short_ids: bool = False,
    spells: ToolFormat | None = None,
) -> list[Plain]:
    """Return messages as Hugging Face's templates expect them: objects as arguments, function names in results.

    Arguments that are no object, or nest more than `max_depth` levels, stay texts. With `wraps_text` they are the
    only field of an object, for templates that accept only objects. With `short_ids`, ids have nine letters and
    digits. With `spells`, calls are part of the content in that format.
    """
    id_of = _short_id if short_ids else str
    names: dict[str | None, str] = {}
    rendered = []
    for message in messages:
        plain: Plain = {"role": message.role, "content": _said(message, spells) if spells else message.content}
        if message.reasoning:
            plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            if spells is None:
                plain["tool_calls"] = [
                    _plain_call(call, max_depth, wraps_text, id_of(call.id or "")) for call in message.tool_calls
                ]
        name = names.get(message.tool_call_id, message.name) if message.role == "tool" else message.name
        if name is not None:
            plain["name"] = name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = id_of(message.tool_call_id)
        rendered.append(plain)
    return rendered


def merge_systems(messages: Sequence[Plain]) -> list[Plain]:
    """Return messages with all that the system says in the first, for templates that show it nowhere else."""
    said = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(said)}, *others] if said else others


def messages_as_text(messages: Sequence[Message], functions: Sequence[Function], form: ToolFormat) -> list[Plain]:
    """Return messages in roles that every template has: tools in the system message, results from the user."""
    rendered: list[Plain] = []
    for message in messages:
        if message.role != "tool":
            rendered.append({"role": message.role, "content": _said(message, form)})
            continue
        result = f"<tool_response>\n{message.content}\n</tool_response>"
        if rendered and rendered[-1].get("is_result"):
            rendered[-1]["content"] += f"\n{result}"
        else:
            rendered.append({"role": "user", "content": result, "is_result": True})
    if functions:
        told = _instructions(functions, form)
        if rendered[0]["role"] == "system":
            told = f"{rendered.pop(0)['content']}\n\n{told}"
        rendered.insert(0, {"role": "system", "content": told})
    return [{"role": plain["role"], "content": plain["content"]} for plain in rendered]


def _said(message: Message, form: ToolFormat) -> str:
    """Return a message's text, with its calls."""
    called = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    if not called:
        return message.content
    between = "\n" if form.separator.strip() else form.separator  # a comma stands only between calls
    return between.join(filter(None, (message.content, form.spell_all(called))))


def _instructions(functions: Sequence[Function], form: ToolFormat) -> str:
    listed = "\n".join(exact_json.encode(_plain_function(function)).decode() for function in functions)
    example = form.spell_all([("NAME", "{...}" if form.rules is None else '{"KEY": "VALUE"}')])
    return (
        f"You can call these functions, each described with a JSON schema of its arguments:\n<tools>\n{listed}\n"
        f"</tools>\nTo call one, write its name and its arguments like this, and nothing else; several calls "
        f"follow one another:\n{example}\nWhat it returns will come between <tool_response> and </tool_response>."
    )


def _plain_function(function: Function) -> Plain:
    """Return a function with a description and parameters, which some templates require."""
    nothing: Plain = {"type": "object", "properties": {}}
    parameters = function.parameters or nothing
    return {"name": function.name, "description": function.description or "", "parameters": parameters}


def _short_id(given: str) -> str:
    """Return the same nine letters and digits for the same id, which is kept if it is that."""
    is_short = len(given) == _SHORT_ID and given.isascii() and given.isalnum()
    return given if is_short else hashlib.blake2b(given.encode(), digest_size=8).hexdigest()[:_SHORT_ID]


def _plain_call(call: ToolCall, max_depth: int, wraps_text: bool, call_id: str) -> Plain:
    text = call.function.arguments
    arguments: Plain | str | None = _object(text, max_depth)
    if arguments is None:
        arguments = {"arguments": text} if wraps_text else text
    return {
        "id": call_id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _object(arguments: str, max_depth: int) -> Plain | None:
    """Return `arguments` as an object; None if they are not one, or nest too deeply for rendering."""
    value = object_of(arguments)
    return None if value is None or is_deeper(value, max_depth) else value
