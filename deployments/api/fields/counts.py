"""Checks the counts and sizes of a request's parts on plain JSON, before objects are made of it.

Values of a wrong type are skipped: the models of `deployments/api/fields/protocol.py` refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deployments.api.base.field_checks import at_most
from deployments.api.http.body import check_num_values
from deployments.config.limits import Limits

_COUNTED = (
    ("max_messages", "messages", "messages"),
    ("max_tools", "tools", "tools"),
    ("max_stop_strings", "stop", "strings"),
    ("max_stop_strings", "stop_sequences", "strings"),
    ("max_stop_token_ids", "stop_token_ids", "ids"),
    ("max_logit_bias", "logit_bias", "entries"),
)
"""Settings, the fields that they bound, and the units that they count."""


def check_counts(fields: Mapping[str, Any], limits: Limits) -> None:
    """Raise `ApiError` 400 that names the first field which has too many entries, or too long a text of JSON."""
    for setting, name, unit in _COUNTED:
        if name in fields and isinstance(given := fields[name], (list, dict)):  # a union is slower
            at_most(limits, setting, name, len(given), unit)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        at_most(limits, "max_prompts", "prompt", len(prompt), "prompts")
    if isinstance(structured := fields.get("structured_outputs"), dict):
        _check_structured(structured, limits)
    if isinstance(messages := fields.get("messages"), list):
        _check_messages(messages, limits)


def _check_structured(given: Mapping[str, Any], limits: Limits) -> None:
    if isinstance(choice := given.get("choice"), list):
        at_most(limits, "max_grammar_choices", "structured_outputs.choice", len(choice), "choices")
        num_chars = sum(len(text) for text in choice if isinstance(text, str))
        at_most(limits, "max_grammar_bytes", "structured_outputs.choice", num_chars, "characters")
    if isinstance(schema := given.get("json"), str):
        at_most(limits, "max_grammar_bytes", "structured_outputs.json", len(schema), "characters")


def _check_messages(messages: list[Any], limits: Limits) -> None:
    arguments: list[str] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if isinstance(parts := message.get("content"), list):
            at_most(limits, "max_content_parts", "messages.content", len(parts), "parts")
        if isinstance(calls := message.get("tool_calls"), list):
            at_most(limits, "max_tools", f"messages.{index}.tool_calls", len(calls), "calls")
            arguments += _arguments(calls)
    if arguments:
        # They are JSON inside texts, whose values were not counted with those of the body.
        texts = [text.encode() for text in arguments]
        check_num_values(texts, limits, "All arguments of tool calls together", "messages")


def _arguments(calls: list[Any]) -> Iterator[str]:
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        given = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(given, str):
            yield given
