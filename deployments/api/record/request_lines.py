"""Prints a line for each answered request, for people who watch a server: its status, its size, and its fault.

    POST /v1/chat/completions 200 12 + 34 tokens, 8 cached, 523 ms
    POST /v1/chat/completions 400 2 ms: messages must have at least one message.

The layer is installed only if the lines are wanted. A probe gets a line when it finds a fault; the probes of
`raydix serve` itself never get one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.http.access import OPEN_PATHS
from deployments.api.http.scopes import error_of, is_own_probe, route_path
from deployments.api.record.observation import record_in
from deployments.api.record.request_record import CLIENT_LEFT, RequestRecord

MAX_CHARS = 240
"""Longest line; of a path, half as much is shown."""


class RequestLines:
    """The ASGI middleware around `Observation` that writes the lines."""

    def __init__(self, app: ASGIApp, write: Callable[[str], None]) -> None:
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; when its answer has ended, write its line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_LEFT

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            if (status >= 400 and not is_own_probe(scope)) or route_path(scope) not in OPEN_PATHS:
                self._write(_line(scope, status, time.monotonic() - began))


def _line(scope: Scope, status: int, seconds: float) -> str:
    path, record, error = route_path(scope), record_in(scope), error_of(scope)
    asked = f"{scope['method']} {path if len(path) <= MAX_CHARS // 2 else path[: MAX_CHARS // 2] + '…'}"
    why = f": {error}" if error else "" if record is None else _end(record, status)
    line = f"{asked} {status} {_work(record)}{1000 * seconds:.0f} ms{why}"
    shown = line[: MAX_CHARS + 1]
    if not shown.isprintable():
        shown = "".join(character if character.isprintable() else "�" for character in shown)
    return shown if len(line) <= MAX_CHARS else shown[:MAX_CHARS] + "…"


def _work(record: RequestRecord | None) -> str:
    if record is None or record.generation is None:
        return ""
    usage = record.generation.answer.usage(record.generation.choices.choices)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, {cached} cached, "


def _end(record: RequestRecord, status: int) -> str:
    """Say how an incomplete answer ended, if its status does not."""
    if record.error_type is not None:
        return f": ended with {record.reason or record.error_type}"
    return ": the client left" if record.finish_reason == "abort" or status == CLIENT_LEFT else ""
