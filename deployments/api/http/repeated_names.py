"""Refuses arguments of calls that give a name twice, because JSON parsers silently keep one of the two values.

    {"function": {"name": "f", "arguments": {"a": 1, "a": 2}}}       refused: ambiguous
    {"function": {"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"}}     a text, which the model sees unchanged

A body without arguments as objects costs two searches. Otherwise only these objects are read again; the whole body
is read again only if one has a name twice, to say where.
"""

from __future__ import annotations

import json
import re
from typing import Any

from deployments.api.base import exact_json
from deployments.api.base.errors import invalid, quoted
from deployments.api.http.written_numbers import ARGUMENTS, Place, path_of

_FORMS = [rf'"{name}"\s*:\s*\{{' for name in sorted(ARGUMENTS)]
_OBJECTS = [re.compile(form.encode()) for form in _FORMS]
_OBJECTS_IN_TEXT = [re.compile(form) for form in _FORMS]


def check_names(body: bytes | bytearray) -> None:
    """Raise `ApiError` 400 where arguments of a call, given as an object, have a name twice.

    The body is valid JSON, and nests no deeper than Python reads.
    """
    if not any(form.search(body) for form in _OBJECTS) or not _repeats_one(body.decode()):
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
            last = {name: index for index, (name, _) in enumerate(members)}
            self.repeated = next(name for index, (name, _) in enumerate(members) if last[name] > index)


def _repeats_one(body: str) -> bool:
    """Whether an object in the place of arguments has a name twice, or another in it."""
    begin = 0
    for found in sorted(match.end() - 1 for form in _OBJECTS_IN_TEXT for match in form.finditer(body)):
        if found < begin:
            continue  # it is in the last one
        try:
            begin = _DECODER.raw_decode(body, found)[1]
        except _Repeated:
            return True
    return False


class _Repeated(Exception):
    """An object has a name twice."""


def _check_distinct(members: list[tuple[str, Any]]) -> None:
    if len(dict(members)) < len(members):
        raise _Repeated


_DECODER = json.JSONDecoder(object_pairs_hook=_check_distinct, parse_int=str, parse_float=str)
