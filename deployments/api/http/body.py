"""Reads and parses request bodies with bounds on their size, nesting, numbers and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

import msgspec
from starlette.requests import ClientDisconnect, Request

from deployments.api.errors import ApiError, invalid
from deployments.config.limits import Limits


class ClientGone(Exception):
    """The client disconnected, so no response can be sent."""


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the body as a JSON object. Raises `ApiError` 400, 408, 413 or 415.

    The content type is ignored, because `curl -d` sends a form's.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, "Compressed bodies are not supported; send the JSON as it is.")
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {limits.body_timeout_s:g} seconds.") from None
    except ClientDisconnect:
        raise ClientGone from None
    if len(body) > limits.inline_body_bytes:
        return await asyncio.to_thread(parse_object, body, limits.max_json_depth)
    return parse_object(body, limits.max_json_depth)


async def _read(request: Request, max_bytes: int) -> bytes:
    """Read the body. The announced length is checked first, and the bytes that arrive are counted anyway."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Parse strict JSON: UTF-8, no NaN or Infinity, no number above a double, no lone surrogate, bounded depth."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        _explain(body, max_depth)
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.")
    # Nesting is at most the number of opening brackets, so most bodies need no walk.
    if body.count(b"[") + body.count(b"{") > max_depth and is_deeper(value, max_depth):
        raise invalid(f"The body is nested deeper than {max_depth} levels.")
    return value


def is_deeper(value: object, depth: int) -> bool:
    """Return whether `value` nests more than `depth` levels, without recursion."""
    level = [value]
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)  # type: ignore[attr-defined]
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _explain(body: bytes, max_depth: int) -> NoReturn:
    """Raise `ApiError` that says what is wrong with a body that the fast parser refused, using a slower parser."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not UTF-8: the byte at position {error.start} is invalid.") from None
    if not text.strip():
        raise invalid("The body is empty; a JSON object was expected.")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise invalid(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise invalid(f"The body is nested deeper than {max_depth} levels.") from None
    except UnicodeEncodeError:
        raise invalid("The body has a lone surrogate (half a character); text must be valid Unicode.") from None
    except ValueError:  # an integer with thousands of digits
        raise invalid("The body has a number that is too large.") from None
    raise invalid("The body has a number that is too large.")


def _refuse_constant(name: str) -> NoReturn:
    raise invalid(f"The body is not valid JSON: {name} is not a JSON number.")
