"""JSON in which numbers keep their text, such as 9007199254740993, 0.10 and 1e400.

A number that every JSON encoder writes as it was read is an int or float; any other is a `WrittenNumber`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from numbers import Number
from secrets import token_hex
from typing import Any, NoReturn

import msgspec
import pydantic_core

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

    @property
    def number(self) -> int | float | None:
        """The nearest number that Python has; None where it has none."""
        try:
            number = int(self._text) if _is_int(self._text) else float(self._text)
        except ValueError:  # Python refuses to convert numbers of thousands of digits
            return None
        return None if number in (math.inf, -math.inf) else number

    def __float__(self) -> float:
        return float(self._text)

    def __bool__(self) -> bool:
        return float(self) != 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._text)


class TooDeep(ValueError):
    """JSON nests deeper than Python can read."""


def parse(text: str, members: Callable[[list[tuple[str, Any]]], object] | None = None) -> Any:
    """Return the value of this JSON, with objects as `members` makes them. Raises ValueError for text that is no
    JSON, and `TooDeep`.
    """
    try:
        return json.loads(
            text, parse_float=_number, parse_int=_number, parse_constant=_refuse, object_pairs_hook=members
        )
    except RecursionError:
        raise TooDeep("it nests too deep") from None


def parse_encodable(text: str, members: Callable[[list[tuple[str, Any]]], object] | None = None) -> Any:
    """Parse as `parse` does. Raises ValueError also for half a character, which cannot be encoded."""
    value = parse(text, members)
    try:
        if "\\u" in text:
            write(value, ensure_ascii=False).encode()
    except RecursionError:
        raise TooDeep("it nests too deep") from None
    return value


def plain(value: Any) -> Any:
    """Return a copy of `value` with ordinary numbers, for readers that know no others."""
    if isinstance(value, dict):
        return {name: plain(child) for name, child in value.items()}
    if isinstance(value, list):
        return [plain(child) for child in value]
    return value.number if isinstance(value, WrittenNumber) else value


def write(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with the options of `json.dumps`. Without options, `encode` is faster."""
    nonce = ""

    def stand_in(number: object) -> str:
        nonlocal nonce
        nonce = nonce or _nonce()
        return nonce + _text_of(number)

    written = json.dumps(value, default=stand_in, **options)
    return _without(nonce, written) if nonce else written


def closed(text: str) -> str:
    """Return the JSON that `text` begins, closed where `text` ends. Raises ValueError if it begins none."""
    nonce = _nonce()
    value = pydantic_core.from_json(
        _STRING_OR_NUMBER.sub(lambda found: found[1] or f'"{nonce}{found[2]}"', text),
        allow_partial="trailing-strings",
    )
    return _without(nonce, msgspec.json.encode(value).decode())


def ordinary(text: str) -> float:
    """Return a number with a fraction or an exponent. Raises ValueError if writers would write it otherwise."""
    number = float(text)
    if not _is_ordinary(number, text):
        raise ValueError(f"{text} is no ordinary number")
    return number


def _nonce() -> str:
    """Return a random text that occurs in no request. It marks a text that stands for a number."""
    return f"m{token_hex(8)}m"


def _without(nonce: str, written: str) -> str:
    """Return JSON with the numbers for which texts with this nonce stand."""
    return re.sub(f'"{nonce}([^"]*)"', r"\1", written)


def _number(text: str) -> int | float | WrittenNumber:
    if _is_int(text):
        return int(text) if len(text) < _LONGEST_INT and text != "-0" else WrittenNumber(text)
    number = float(text)
    return number if _is_ordinary(number, text) else WrittenNumber(text)


def _is_int(text: str) -> bool:
    return text.lstrip("-").isdigit()


def _is_ordinary(number: float, text: str) -> bool:
    """Whether all writers write a number as this text. They differ in exponents."""
    return repr(number) == text and "e" not in text


def _text_of(number: object) -> str:
    if not isinstance(number, WrittenNumber):
        raise TypeError(f"{type(number).__name__} is not a JSON type")
    return str(number)


encode = msgspec.json.Encoder(enc_hook=lambda number: msgspec.Raw(_text_of(number).encode())).encode
"""Encodes a value as JSON without blanks."""


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
