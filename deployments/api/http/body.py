"""Reads and parses request bodies with bounds on their size, nesting, numbers and time."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from deployments.api.base import exact_json
from deployments.api.base.errors import ApiError, invalid, quoted
from deployments.api.base.field_checks import check_depth, too_deep
from deployments.api.base.off_loop import off_loop
from deployments.api.http.body_memory import VALUE_BYTES, BodyRoom
from deployments.api.http.json_size import NESTED, count_values, most_values
from deployments.api.http.packed_body import packing_of, unpacked
from deployments.api.http.repeated_names import check_names
from deployments.api.http.scopes import header
from deployments.api.http.written_numbers import settle
from deployments.config.limits import Limits
from deployments.wire.deadlines.time_limit import TimeLimit

ReadBody = Callable[[Request], Awaitable[dict[str, Any]]]
"""Reads a request's body, a JSON object, within the bounds of the service. Raises `ApiError`."""
_decode = msgspec.json.Decoder(float_hook=exact_json.ordinary).decode
"""Raises `msgspec.ValidationError` for a number whose text would be lost, except -0."""
_MINUS_ZERO = re.compile(rb"-0[\s,}\]]")
_LONG_BYTES = 8192


class ClientGone(Exception):
    """The client disconnected, so no response can be sent."""


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A parsed body."""

    fields: dict[str, Any]
    is_large: bool
    """Whether it has too many bytes or values to be worked on between two turns of the event loop."""
    text: bytes | bytearray = b""
    """The body itself, unpacked, where it was to be kept."""


async def read_json(request: Request, limits: Limits, room: BodyRoom, most_kept: int = 0) -> JsonBody:
    """Return the body, a JSON object, which takes `room`; with its text if that has at most `most_kept` bytes.

    Raises `ApiError` 400, 408, 413, 415 or 429.
    """
    _check_type(request)
    packing = packing_of(request)
    limit = TimeLimit(total_s=limits.body_timeout_s)
    try:
        with limit:
            body = await _read(request, limits.max_body_bytes, room)
    except TimeoutError:
        message = f"The body did not arrive within {limits.body_timeout_s:g} seconds (limits.body_timeout_s)."
        raise ApiError(408, message) from None
    finally:
        limit.close()
    if packing is not None:
        body = await unpacked(body, packing, limits.max_body_bytes, room)
    text = body if len(body) <= most_kept else b""
    if len(body) <= limits.inline_body_bytes and (most := most_values(body)) <= limits.inline_json_values:
        return JsonBody(_parse_within(room, body, limits, most), False, text)
    fields = await off_loop(lambda: _parse_within(room, body, limits, most_values(body)))
    return JsonBody(fields, True, text)


def _parse_within(room: BodyRoom, body: bytearray, limits: Limits, most: int) -> dict[str, Any]:
    """Parse a body of at most `most` values, for which room is taken first."""
    # Commas in texts count too, as a text may be JSON itself: arguments of calls are.
    room.take(min(most, 2 * limits.max_json_values) * VALUE_BYTES)
    return parse_object(body, limits, most)


def _check_type(request: Request) -> None:
    """Raise `ApiError` 415 unless the body is declared as JSON, or not at all by a program.

    A browser lets pages of any site send forms, plain text and bodies without a type, and asks the server first
    only where the type is another. It names the page's site, which programs do not.
    """
    given = header(request.scope, b"content-type") or ""
    if given == "application/json":
        return
    media = given.partition(";")[0].strip().lower()
    if media == "application/json" or media.endswith("+json"):
        return
    if given or header(request.scope, b"origin") is not None:
        kind = f"is of the content type {quoted(given)}" if given else "has no content type"
        raise ApiError(
            415,
            f"The body {kind}, and only JSON is read: send the header content-type: application/json (with curl, "
            "-H 'content-type: application/json').",
        )


async def _read(request: Request, max_bytes: int, room: BodyRoom) -> bytearray:
    """Read the body. The announced length is checked first, and the bytes that arrive are counted anyway."""
    announced = header(request.scope, b"content-length") or ""
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    body, has_more = bytearray(), True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        room.take(len(chunk))
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        has_more = message.get("more_body", False)
    return body


def _too_large(max_bytes: int) -> ApiError:
    message = f"The body is larger than {max_bytes} bytes (limits.max_body_bytes)."
    return ApiError(413, message, code="request_too_large")


def parse_object(body: bytes | bytearray, limits: Limits, most: int | None = None) -> dict[str, Any]:
    """Parse strict JSON: UTF-8, with a byte order mark or without; no NaN or Infinity, no lone surrogate, bounded
    depth. Numbers keep their text as `written_numbers.settle` says.

    The number of values is bounded before any is made; `most` is `most_values(body)`, where that is known.
    """
    if body.startswith(BOM_UTF8):  # some editors and languages write a byte order mark
        body = body[len(BOM_UTF8) :]
    most = most_values(body) if most is None else most
    if most > limits.max_json_values:
        check_num_values([body], limits, "The body")
    value, has_written = _parsed(body, limits)
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.")
    if _may_nest_deeper(body, most, limits.max_json_depth):
        check_depth(limits, "max_json_depth", value)
    check_names(body)
    if has_written:
        settle(value)
    return value


def _may_nest_deeper(body: bytes | bytearray, most: int, depth: int) -> bool:
    """Whether there may be more than `depth` opening brackets. Those of a long body take longer to count than it
    takes to walk its values.
    """
    return most > depth * NESTED and (len(body) > _LONG_BYTES or body.count(b"[") + body.count(b"{") > depth)


def _parsed(body: bytes | bytearray, limits: Limits) -> tuple[Any, bool]:
    """Parse a body, and return whether some of its numbers may be `WrittenNumber`s."""
    try:
        if _MINUS_ZERO.search(body) is None:
            return _decode(body), False
    except msgspec.ValidationError:
        pass  # for a number whose text would be lost
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if body.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or 0 in body[:4]:
            raise invalid("The body is UTF-16 or UTF-32; send JSON in UTF-8.") from None
        if len(body) > limits.inline_body_bytes:  # The slower parser would take too long to find the place.
            raise invalid(f"The body is not valid JSON: {error}.") from None
    return _parsed_exactly(body, limits), True


def check_num_values(
    texts: Sequence[bytes | bytearray], limits: Limits, what: str, param: str | None = None
) -> None:
    """Raise `ApiError` 400 when JSON texts, named `what`, have too many values together. Makes none of them."""
    most = limits.max_json_values
    if sum(map(most_values, texts)) <= most:
        return
    num_values = 0
    for text in texts:
        num_values += count_values(text, most - num_values)
        if num_values > most:
            raise invalid(
                f"{what} must have at most {most} values (limits.max_json_values; a value with a name "
                "counts 5 more, an array or object 10); send fewer or shorter arrays and objects.",
                param,
            )


def _parsed_exactly(body: bytes | bytearray, limits: Limits) -> Any:
    """Parse a body with the text of its numbers. Raises `ApiError` that says what is wrong with it, and where."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise invalid(f"The body is not UTF-8: the byte at position {fault.start} is invalid.") from None
    if not text.strip():
        raise invalid("The body is empty; a JSON object was expected.")
    try:
        return exact_json.parse_encodable(text)
    except json.JSONDecodeError as fault:
        raise invalid(
            f"The body is not valid JSON: {fault.msg} at line {fault.lineno}, column {fault.colno}."
        ) from None
    except exact_json.TooDeep:
        raise too_deep(limits, "max_json_depth", None) from None
    except UnicodeEncodeError:
        raise invalid("The body has a lone surrogate (half a character); text must be valid Unicode.") from None
    except ValueError as fault:
        raise invalid(f"The body is not valid JSON: {fault}.") from None
