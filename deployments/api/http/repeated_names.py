"""Refuses arguments of calls that name something twice: of two values, JSON's readers keep one in silence.

    {"function": {"name": "f", "arguments": {"a": 1, "a": 2}}}       refused: nobody can say which one is meant
    {"function": {"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"}}     a text, which the model is shown as it is

A body without arguments as objects costs two searches. With them, its names are counted, in the text and in what
was made of it; only if there are fewer in the latter, it is read again, to say which name it is.
"""

from __future__ import annotations

import re
from typing import Any

from deployments.api import exact_json
from deployments.api.errors import invalid, quoted
from deployments.api.http.json_size import count_names
from deployments.api.http.written_numbers import ARGUMENTS, Place, path_of

_OBJECTS = [re.compile(rb'"%s"\s*:\s*\{' % name.encode()) for name in sorted(ARGUMENTS)]


def check_names(body: bytes | bytearray, value: dict[str, Any]) -> None:
    """Raise `ApiError` 400 where arguments of a call, as objects of a body that means `value`, have a name twice.

    The body must nest no deeper than Python reads.
    """
    if not any(form.search(body) for form in _OBJECTS) or count_names(body) == _num_names(value):
        return
    left: list[tuple[Any, Place | None, bool]] = [(exact_json.parse(body.decode(), _Members), None, False)]
    while left:
        node, place, is_argument = left.pop()
        if is_argument and isinstance(node, _Members) and node.repeated is not None and place is not None:
            path = path_of(place)
            raise invalid(
                f"{path} has the name {quoted(node.repeated)} twice, and only one of its values could be kept; "
                "give each name once, or the arguments as a text.",
                path,
            )
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(child, dict | list):
                left.append((child, (place, key), is_argument or (place is not None and key in ARGUMENTS)))


class _Members(dict[str, Any]):
    """The members of an object, and a name that it has twice."""

    def __init__(self, members: list[tuple[str, Any]]) -> None:
        super().__init__(members)
        self.repeated: str | None = None
        if len(self) < len(members):
            names = [name for name, _ in members]
            self.repeated = next(name for name in names if names.count(name) > 1)


def _num_names(value: object) -> int:
    count, nodes = 0, [value]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            count += len(node)
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return count
