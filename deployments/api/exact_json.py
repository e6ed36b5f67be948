"""JSON whose numbers keep the text with which they were written, as 9007199254740993, 0.10 and 1e400 do.

A number that Python writes as it was read is an ordinary int or float; any other is a `WrittenNumber`.
"""

from __future__ import annotations

import json
import re
from numbers import Number
from typing import Any, NoReturn

import msgspec
import pydantic_core

from deployments.api.randomness import random_hex

_LONGEST_INT = 256
"""Most digits of a number that is converted to an int: Python refuses to convert thousands of digits."""
_STRING_OR_NUMBER = re.compile(
    r"""("(?:[^"\\]|\\.)*"?)|(-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=[\s,}\]])""", re.DOTALL
)


class WrittenNumber(Number):
    """A number that is shown as it was written, also by a chat template."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __float__(self) -> float:
        return float(self._text)

    def __bool__(self) -> bool:
        return float(self) != 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._text)


def parse(text: str) -> Any:
    """Return what this JSON means. Raises ValueError for what is none, or nests too deep."""
    try:
        return json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def write(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with the options of `json.dumps`."""
    nonce = ""

    def stand_in(number: object) -> str:
        nonlocal nonce
        if not isinstance(number, WrittenNumber):
            raise TypeError(f"{type(number).__name__} is no type of JSON")
        nonce = nonce or _nonce()
        return f"{nonce}{number}"

    written = json.dumps(value, default=stand_in, **options)
    return _without(nonce, written) if nonce else written


def closed(text: str) -> str:
    """Return the JSON that `text` begins, as far as it was written. Raises ValueError if it begins none."""
    nonce = _nonce()
    value = pydantic_core.from_json(
        _STRING_OR_NUMBER.sub(lambda found: found[1] or f'"{nonce}{found[2]}"', text),
        allow_partial="trailing-strings",
    )
    return _without(nonce, msgspec.json.encode(value).decode())


def _nonce() -> str:
    """Return a text that nobody else writes. It marks what stands for a number."""
    return f"m{random_hex(8)}m"


def _without(nonce: str, written: str) -> str:
    """Return JSON with the numbers for which texts with this nonce stand."""
    return re.sub(f'"{nonce}([^"]*)"', r"\1", written)


def _number(text: str) -> int | float | WrittenNumber:
    is_int = text.lstrip("-").isdigit() and len(text) < _LONGEST_INT
    number = int(text) if is_int else float(text)
    return number if repr(number) == text else WrittenNumber(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
