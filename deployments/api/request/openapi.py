"""What /openapi.json says of requests' bodies, which the framework does not parse: it is told here.

pydantic describes what the models take. Before them, `fields.py` takes fields that change nothing, those that are
not supported as long as their value has no effect, and unknown ones, unless the service's settings refuse these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from deployments.api.request.answer_forms import STRUCTURED_OUTPUTS_UNSUPPORTED
from deployments.api.request.fields import HARMLESS
from deployments.api.request.history import THOUGHTS
from deployments.api.request.strict_model import StrictModel

_PREFIX = "#/components/schemas/"
_OF_PARTS = {"StructuredOutputs": STRUCTURED_OUTPUTS_UNSUPPORTED}
"""Fields without effect of what bodies consist of, by the model's name."""


@cache  # making it takes most of the time in which an application is put together
def body_of(kind: type[StrictModel]) -> dict[str, Any]:
    """Return the description of an endpoint whose body is a `kind`, with the definitions that it refers to.

    All applications of a process share it; FastAPI copies it into their documents.
    """
    return {"requestBody": {"content": {"application/json": {"schema": _schema(kind)}}, "required": True}}


def _schema(kind: type[StrictModel]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=_PREFIX + "{model}")
    schema.setdefault("$defs", {})
    del schema["additionalProperties"]
    if kind.unsupported:
        harmless = sorted(HARMLESS - schema["properties"].keys())
        label = {"description": "Accepted, and changes nothing."}
        schema["properties"] |= dict.fromkeys(harmless, label) | _without_effect(kind.unsupported)
    for name, fields in _OF_PARTS.items():
        if name in schema["$defs"]:
            schema["$defs"][name]["properties"] |= _without_effect(fields)
    if "Message" in schema["$defs"]:
        _as_cleaned(schema["$defs"]["Message"])
    return schema


def _as_cleaned(message: dict[str, Any]) -> None:
    """Describe a message as it is before `history.taken_messages` has taken it, which leaves out what is another
    role's.
    """
    fields, text = message["properties"], {"required": ["content"]}
    calls, reasoning, result = (fields.pop(name) for name in ("tool_calls", "reasoning", "tool_call_id"))
    content = fields.pop("content")
    words, parts, nothing = content["anyOf"]
    thoughts = {"type": "object", "required": ["type"], "properties": {"type": {"enum": [*THOUGHTS]}}}
    answer = [words, nothing, {"type": "array", "items": {"anyOf": [parts["items"], thoughts]}}]
    answered = {
        "content": {"anyOf": answer},
        "tool_calls": {"anyOf": [calls, nothing]},
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    message["required"].remove("content")
    message["anyOf"] = [
        {"properties": {"role": {"const": "assistant"}, **answered}},
        {
            "properties": {"role": {"enum": ["tool", "function"]}, "content": content, "tool_call_id": result},
            **text,
        },
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
