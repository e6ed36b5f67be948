"""Describes request bodies in /openapi.json, because the framework does not parse them. pydantic describes the
fields of the models. Before them, `ignored.py` accepts unsupported fields whose values have no effect. A setting
decides whether objects may have other fields: `document/bounds.py` adds that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from deployments.api.fields.answer_forms import STRUCTURED_OUTPUTS_UNSUPPORTED
from deployments.api.fields.history import KNOWN, THOUGHTS
from deployments.api.fields.strict_model import StrictModel

_PREFIX = "#/components/schemas/"
_OF_PARTS = {"StructuredOutputs": STRUCTURED_OUTPUTS_UNSUPPORTED}
"""Fields without effect of objects within bodies, by the model's name."""


@cache  # pydantic takes about 10 ms for one
def body_of(kind: type[StrictModel]) -> dict[str, Any]:
    """Return the description of an endpoint whose body is a `kind`, with the definitions that it refers to.

    All applications of a process share it, so documents get copies.
    """
    return {"requestBody": {"content": {"application/json": {"schema": _schema(kind)}}, "required": True}}


def _schema(kind: type[StrictModel]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=_PREFIX + "{model}")
    schema.setdefault("$defs", {})
    schema["properties"] |= _without_effect(kind.unsupported)
    for name, fields in _OF_PARTS.items():
        if name in schema["$defs"]:
            schema["$defs"][name]["properties"] |= _without_effect(fields)
    if "Message" in schema["$defs"]:
        _as_cleaned(schema["$defs"]["Message"])
    return schema


def _as_cleaned(message: dict[str, Any]) -> None:
    """Describe a message before `history.taken_messages`, which omits fields of other roles."""
    fields, text = message["properties"], {"required": ["content"]}
    content, calls, reasoning, result = (
        fields.pop(name) for name in ("content", "tool_calls", "reasoning", "tool_call_id")
    )
    fields |= {name: {} for name in sorted(KNOWN - fields.keys())}
    words, parts, nothing = content["anyOf"]
    thoughts = {"type": "object", "required": ["type"], "properties": {"type": {"enum": [*THOUGHTS]}}}
    answer = [words, nothing, {"type": "array", "items": {"anyOf": [parts["items"], thoughts]}}]
    answered = {
        "role": {"const": "assistant"},
        "content": {"anyOf": answer},
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    none, called = [nothing, {"const": []}], {"$ref": f"{_PREFIX}CalledFunction"}
    older = {"anyOf": [called, {"not": {"type": "object"}}]}
    message["required"].remove("content")
    message["anyOf"] = [
        {"properties": {**answered, "tool_calls": {**calls, "minItems": 1}}, "required": ["tool_calls"]},
        {"properties": {**answered, "tool_calls": {"anyOf": none}, "function_call": older}},
        {"properties": {"role": {"const": "tool"}, "content": content, "tool_call_id": result}, **text},
        {"properties": {"role": {"const": "function"}, "content": content}, **text},
        {
            "properties": {
                "role": {"enum": ["system", "developer", "user"]},
                "content": {"anyOf": [words, parts]},
            },
            **text,
        },
    ]


def _without_effect(fields: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    text = "Not supported: accepted only with a value that changes nothing."
    return {name: {"enum": [None, *neutral], "description": text} for name, neutral in fields.items()}
