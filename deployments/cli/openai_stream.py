"""A minimal client of OpenAI-compatible servers: list models, and stream one answer, across broken connections."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from deployments.cli.errors import UserError, one_line
from deployments.cli.unreachable import unreachable

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0
"""Longest silence in seconds; a long prompt in a full queue waits for its first token."""
RECONNECT_S = 0.5
"""Seconds before a client asks for the rest of an answer that broke off, unless the server names a longer time."""
GIVE_UP_S = 60.0
"""Seconds after which it stops asking if no further event has come."""
_PASSING_STATUSES = (429, 502, 503)
_PASSING_CODES = ("unavailable", "overloaded", "aborted", "engine_lost")
"""Failures after which the same request may succeed."""


class ServerError(Exception):
    """The server refused or failed; the message is for the user."""


class BrokenOffError(ServerError):
    """The connection is gone, or the server cannot answer at the moment: the same request may succeed later."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the server had cached."""
    completion_tokens: int

    @classmethod
    def from_json(cls, usage: dict[str, Any]) -> Usage:
        """Read the `usage` object of a response. Missing counts become 0."""
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            int(usage.get("prompt_tokens") or 0),
            int(details.get("cached_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
        )


class Client:
    """Talks to one server. A context manager whose methods raise only `ServerError`."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # The session id groups the turns of this conversation for the router, however short the first is.
        headers = {"x-session-id": uuid.uuid4().hex}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(f"{url!r} is not a URL: {one_line(error)}", 2) from None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the server's models."""
        try:
            response = self._http.get("/v1/models")
            _raise_for_status(response)
            return [str(model["id"]) for model in response.json()["data"]]
        except httpx.HTTPError as error:
            raise ServerError(self._unreachable(error)) from None
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self.url} does not answer like an OpenAI-compatible server") from None

    def chat(
        self,
        model: str,
        messages: Sequence[dict[str, str]],
        on_break: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> Generator[str | Usage]:
        """Yield the text of one answer as it arrives, and its usage at the end. Close the iterator to stop it.

        If the answer breaks off and its events have ids, the same request is sent again and continues after the
        last event, until no event has come for `GIVE_UP_S`. `on_break` is called once for each break.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        last_id, patience = b"", _Patience(on_break)
        try:
            while True:
                try:
                    with closing(self._events(body, last_id)) as events:
                        for event in events:
                            if event.id:
                                last_id = event.id
                                patience.renew()
                            if event.data == b"[DONE]":
                                return
                            yield from _parts(event.data)
                    raise BrokenOffError("the answer was cut off: the server closed the connection")
                except BrokenOffError as error:
                    if not last_id:
                        raise
                    patience.wait(error)
        except (GeneratorExit, KeyboardInterrupt):
            self._end(last_id)
            raise

    def _events(self, body: dict[str, Any], last_id: bytes) -> Generator[_Event]:
        """Yield the events of one connection, after the one with this id."""
        headers = {b"accept": b"text/event-stream"} | ({b"last-event-id": last_id} if last_id else {})
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.is_error:
                    response.read()
                _raise_for_status(response)
                yield from _split(response.iter_bytes())
        except httpx.HTTPError as error:
            raise BrokenOffError(self._unreachable(error)) from None

    def _end(self, last_id: bytes) -> None:
        """End a stream whose reader has left. Without this, the server generates it further for a while."""
        if last_id:
            name = quote(last_id.partition(b":")[0], safe="")
            with suppress(httpx.HTTPError):
                self._http.delete(f"/v1/streams/{name}", timeout=CONNECT_TIMEOUT_S)

    def _unreachable(self, error: httpx.HTTPError) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
            return unreachable(self.url, error)
        return f"the connection to {self.url} broke: {one_line(error)}"


class _Patience:
    """The time that is left to continue an answer."""

    def __init__(self, on_break: Callable[[], None]) -> None:
        self._on_break = on_break
        self._ends: float | None = None

    def renew(self) -> None:
        """Note that an event has come."""
        self._ends = None

    def wait(self, error: BrokenOffError) -> None:
        """Wait before the next connection. Raises `ServerError` if no time is left."""
        now, wait_s = time.monotonic(), max(RECONNECT_S, error.retry_after_s)
        if self._ends is None:
            self._ends = now + GIVE_UP_S
            self._on_break()
        if now + wait_s > self._ends:
            raise ServerError(f"{error}; the answer could not be continued for {GIVE_UP_S:g} s") from None
        time.sleep(wait_s)


@dataclass(frozen=True, slots=True)
class _Event:
    """A server-sent event."""

    id: bytes
    """Its id; empty if it has none."""
    data: bytes


def _split(chunks: Iterator[bytes]) -> Iterator[_Event]:
    """Yield the events in a stream's bytes, without one that the end of the stream cuts."""
    unread = b""
    for chunk in chunks:
        *events, unread = (unread + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            fields = dict(_field(line) for line in event.split(b"\n"))
            if b"data" in fields:
                yield _Event(fields.get(b"id", b""), fields[b"data"])


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name, value.strip()


def _parts(data: bytes) -> Iterator[str | Usage]:
    """Yield text and usage of an event. Raises `ServerError` if it reports a failure."""
    try:
        event = json.loads(data)
    except ValueError:
        raise ServerError("the server sent something that is not JSON") from None
    if error := event.get("error"):
        message = str(error.get("message", error) if isinstance(error, dict) else error)
        may_pass = isinstance(error, dict) and error.get("code") in _PASSING_CODES
        raise BrokenOffError(message) if may_pass else ServerError(message)
    for choice in event.get("choices") or []:
        if text := (choice.get("delta") or {}).get("content"):
            yield text
    if usage := event.get("usage"):
        yield Usage.from_json(usage)


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase or "no explanation"
    wait = response.headers.get("retry-after")
    hint = f", try again in {wait} s" if wait else ""
    text = f"{message} (HTTP {response.status_code}{hint})"
    if response.status_code not in _PASSING_STATUSES:
        raise ServerError(text)
    raise BrokenOffError(text, float(wait) if (wait or "").isdecimal() else 0.0)
