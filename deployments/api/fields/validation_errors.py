"""Error messages for bodies that do not fit the model of their endpoint."""

from __future__ import annotations

from pydantic import ValidationError

from deployments.api.base.errors import ApiError, invalid, quoted

_EXPECTED = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than_equal": "must be a 64-bit integer",
    "less_than": "must be a 64-bit integer",
    "extra_forbidden": "is not a known field",
    "string_pattern_mismatch": "must be 1 to 128 letters, digits, underscores and dashes",
}
_OURS = frozenset(
    {
        "ids",
        "stop",
        "logit_bias",
        "content",
        "role",
        "prompt",
        "early_stopping",
        "response_format",
        "structured_outputs",
        "tools",
        "one_of",
        "field",
    }
)
"""Error types of `field_values.py` and of the forms of answers, whose messages are our own."""


def translated(error: ValidationError) -> ApiError:
    """Return pydantic's first error in our words, which do not change with its version.

    A name in angle brackets in the path to a field is the tag of one of several forms of an object.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(part for part in map(str, first["loc"]) if not part.startswith("<"))[:128]
    kind = first["type"]
    expected = first["msg"] if kind in _OURS else _EXPECTED.get(kind, "has a wrong value")
    got = f", got {quoted(first['input'])}" if kind.endswith(("_type", "_number", "_float")) else ""
    return invalid(f"{path} {expected}{got}.", path)
