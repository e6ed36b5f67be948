"""Selects the numbers of a body that keep the client's text.

    {"temperature": 1E0, "messages": [{"tool_calls": [{"function": {"arguments": {"count": 1E0}}}]}]}
                    1.0                                                                    1E0

Arguments of calls, and the schemas and documents that the model is shown, are written into its prompt as JSON. A
number in them keeps the client's text, so a number from the model's earlier answer returns unchanged, and its KV
is found again. Elsewhere a number is only a number.
"""

from __future__ import annotations

from typing import Any, TypeAlias, Union

from deployments.api.base.errors import invalid, quoted
from deployments.api.base.exact_json import WrittenNumber

ARGUMENTS = frozenset({"arguments", "input"})
"""Fields with the arguments of a call. An `input` of the body itself is something else."""
_SHOWN = frozenset({"parameters", "input_schema", "documents"})
"""Fields with other JSON that the model is shown. The server reads it, too, so Python must have its numbers."""
_SHOWN_CHARS = 64
Place: TypeAlias = tuple[Union["Place", None], str | int]
"""A value's place: its container, and its name or index there. A path would take memory for each."""


def settle(body: dict[str, Any]) -> None:
    """Turn the `WrittenNumber`s of a body into ordinary numbers wherever their text does not matter.

    Raises `ApiError` 400 that names the first number that is larger than any ordinary one.
    """
    left: list[tuple[Any, Place | None, bool]] = [(body, None, False)]
    while left:
        node, place, is_shown = left.pop()
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(child, WrittenNumber):
                number = child.number
                if number is None:
                    path = path_of((place, key))
                    raise invalid(f"{path} is {quoted(child)}, which is too large for a number.", path)
                if not is_shown:
                    node[key] = number
            elif isinstance(child, dict | list) and (place is None or key not in ARGUMENTS):
                left.append((child, (place, key), is_shown or key in _SHOWN))


def path_of(place: Place) -> str:
    """Return the dotted path of a place, whose names are the client's and may be long."""
    before, key = place
    name = str(key)[:_SHOWN_CHARS]
    return name if before is None else f"{path_of(before)}.{name}"
