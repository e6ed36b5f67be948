"""Normalizes fields of requests that have several forms with one meaning, and describes wrong ones.

Pydantic calls these functions with the body's value, before it checks the field's type.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.api.base.errors import quoted
from deployments.api.fields.content_parts import TEXT_OF

MAX_ID_DIGITS = 10
"""Most digits of a token id that is a key of an object."""


def parse_stop(value: object) -> object:
    """Return stop strings, of which one may come by itself, as a list."""
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise PydanticCustomError("stop", "must be a string or an array of strings")
    return strings


def parse_logit_bias(value: object) -> object:
    """Parse an object whose keys are token ids written as strings; errors name the first wrong key."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids to numbers")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise PydanticCustomError("logit_bias", f"has the key {quoted(key)}; keys are token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("logit_bias", "must hold numbers")
        biases[int(key)] = float(bias) if abs(bias) <= 1e6 else 1e6  # out of range; it is refused later
    return biases


def join_content(value: object) -> object:
    """Return text, joining text parts by newlines as the chat templates of text models expect."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or a non-empty array of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in TEXT_OF:
            raise PydanticCustomError("content", f"has a part of type {quoted(kind)}; only text is supported")
        text = part.get(TEXT_OF[kind]) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise PydanticCustomError("content", 'must have parts of the form {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


def parse_role(value: object) -> object:
    """Return a message's role; a developer's is the system's."""
    if not isinstance(value, str) or value not in ("system", "developer", "user", "assistant", "tool"):
        raise PydanticCustomError(
            "role", f"must be one of system, developer, user, assistant and tool, got {quoted(value)}"
        )
    return "system" if value == "developer" else value


def parse_prompt(value: object) -> object:
    """Return one or several prompts, each text or token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "must be text, token ids, or an array of either")
    if not value:
        raise PydanticCustomError("prompt", "is empty: it needs at least one token")
    if are_ids(value):
        return [value]
    if all(isinstance(prompt, str) for prompt in value):
        return value
    value = [whole_ids(whole(prompt)) for prompt in value]
    if are_ids(value):
        return [value]
    if all(isinstance(prompt, list) and are_ids(prompt) for prompt in value):
        return value
    raise PydanticCustomError("prompt", "must be text, token ids (integers), or an array of either, not mixed")


def none_as_empty(value: object) -> object:
    """Replace null by an empty list."""
    return [] if value is None else value


def whole(value: object) -> object:
    """Return an integer for one that is written with a fraction of zero, as in 5.0: in JSON they are the same."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_ids(value: object) -> object:
    """Return an array of integers for one in which some are written so."""
    return value if not isinstance(value, list) or are_ids(value) else [whole(one) for one in value]


def parse_ids(value: object) -> object:
    """Return token ids; null is none."""
    if value is None:
        return []
    value = whole_ids(value)
    if not isinstance(value, list) or not are_ids(value):
        raise PydanticCustomError("ids", "must be an array of token ids (integers)")
    return value


def parse_service_tier(value: object) -> object:
    """Take a service tier that is done here; all others are none."""
    return value if value in ("flex", "priority") else None if isinstance(value, str) else value


def one_of(*values: str) -> BeforeValidator:
    """Have a field take these strings only, or null."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            raise PydanticCustomError("one_of", f"must be one of {', '.join(values)}, got {quoted(value)}")
        return value

    return BeforeValidator(check)


def parse_early_stopping(value: object) -> object:
    """Take the stopping rules that a beam search knows."""
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise PydanticCustomError("early_stopping", 'must be true, false or "never"')


def are_ids(values: list[object]) -> bool:
    """Return whether all are integers, by exact type, as true is an int to isinstance.

    One pass in C, for prompts of a million ids.
    """
    return set(map(type, values)) <= {int}


def other_than(*known: str) -> WithJsonSchema:
    """Have /openapi.json describe a text that is none of these."""
    return WithJsonSchema({"type": "string", "not": {"enum": sorted(known)}})


def described_as(form: object) -> BeforeValidator:
    """Have /openapi.json describe a field by `form`, which is checked elsewhere."""
    return taking(lambda value: value, form)


def taking(parse: Callable[[object], object], form: object) -> BeforeValidator:
    """Have `parse` prepare a field; /openapi.json describes its input as `form`."""
    return BeforeValidator(parse, json_schema_input_type=form)
