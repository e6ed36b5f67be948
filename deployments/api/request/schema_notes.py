"""Names what constrains nothing in the JSON schema of an answer, as other unknown fields are named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deployments.api.request.fields import IgnoredFields
from engine.grammar.schema_keywords import unknown_in

_PLACES = (
    "response_format.json_schema.schema",
    "structured_outputs.json",
    "guided_json",
    "json_schema",
    "text.format.schema",
    "output_config.format.schema",
    "output_format.schema",
)
"""Where requests to one or another API have a schema."""


def note_unknown(fields: Mapping[str, Any], ignored: IgnoredFields) -> None:
    """Ignore unknown keywords and formats by the rule for unknown fields. Raises `ApiError` if it refuses them."""
    for place in _PLACES:
        schema: Any = fields
        for name in place.split("."):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
        for where, value in unknown_in(_read(schema)):
            ignored.add(where, value, (), f"{place}.")


def _read(schema: object) -> object:
    """Return a schema that may be given as its text; None for what is no JSON, which is refused elsewhere."""
    if not isinstance(schema, str):
        return schema
    try:
        found: object = json.loads(schema)
    except (ValueError, RecursionError):
        return None
    return found
