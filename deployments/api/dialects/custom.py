"""Custom tools, whose input is a text: to the model they are functions with one argument, `input`.

{"type": "custom", "name": "apply_patch"}   ─▶   a function with {"input": {"type": "string"}}
"*** Begin Patch …"                         ◀─   {"input": "*** Begin Patch …"}, piece by piece
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from deployments.api.base import exact_json
from deployments.api.dialects.named import object_of

_INPUT = "input"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
"""The schema of the arguments."""
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_TEXT = re.compile(r'(?:[^"\\]|\\[^u]|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))*')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""The first half of a character, whose second half is another escape."""


def as_function(called: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a custom tool, which has a name and an input, as that of the function."""
    text = called.get(_INPUT)
    given = "" if text is None else text
    return {"name": called.get("name"), "arguments": exact_json.encode({_INPUT: given}).decode()}


class InputText:
    """Reads the input from the arguments of one call while the model writes them.

    Text that the model wrote instead of an `input` is yielded unchanged, once the call has ended, so that none is
    lost.
    """

    def __init__(self) -> None:
        self._state: Literal["before", "inside", "after", "elsewhere"] = "before"
        self._held = ""
        """Text that was received but not yielded: an input that has not begun, or an escape that has not ended."""
        self._written: list[str] = []
        """The whole text, if no input begins the arguments, or the text after the input."""

    def push(self, arguments: str) -> str:
        """Return the text that further arguments add."""
        if self._state == "before":
            self._held += arguments
            self._begin()
            arguments = ""
        if self._state in ("elsewhere", "after"):
            self._written.append(arguments)
        return self._inside(arguments) if self._state == "inside" else ""

    def finish(self) -> str:
        """Return the rest once the call has ended, or was cut off."""
        return self._apart()[0] if self._state == "elsewhere" else ""

    def other_text(self) -> str:
        """Return the text before or after the input, once the call has ended: other arguments."""
        if self._state == "elsewhere":
            return self._apart()[1]
        if self._state != "after":
            return ""
        return "".join(self._written).strip().lstrip(",").removesuffix("}").strip()

    def _apart(self) -> tuple[str, str]:
        """Return the input and the other arguments, if these come first. Text without arguments is all input."""
        written = "".join(self._written)
        values = object_of(written)
        if values == {}:
            return "", ""
        text = None if values is None else values.pop(_INPUT, None)
        if not values or not isinstance(text, str):
            return (text if isinstance(text, str) else written), ""
        return text, exact_json.encode(values).decode()[1:-1]

    def _begin(self) -> None:
        """Determine whether the arguments begin with the input, as soon as enough of them are known."""
        if (opening := _OPENING.match(self._held)) is not None:
            self._state, self._held = "inside", self._held[opening.end() :]
        elif not '{"input":"'.startswith("".join(self._held.split())):
            self._state, self._written, self._held = "elsewhere", [self._held], ""

    def _inside(self, arguments: str) -> str:
        self._held += arguments
        text = _TEXT.match(self._held)
        assert text is not None  # it matches the empty text
        end = text.end()
        if self._held[end : end + 1] == '"':
            self._state, self._written = "after", [self._held[end + 1 :]]
        elif half := _HALF.search(self._held, 0, end):
            end = half.start()
        spelled, self._held = self._held[:end], self._held[end:]
        return _unescaped(spelled)


def _unescaped(spelled: str) -> str:
    """Return the text that the inside of a JSON string spells; other text is returned unchanged."""
    if "\\" not in spelled:
        return spelled
    try:
        text: str = json.loads(f'"{spelled}"', strict=False)
    except ValueError:
        return spelled
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
