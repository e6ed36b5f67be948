"""A minimal client of OpenAI-compatible servers: list models, and stream one answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deployments.cli.errors import UserError, one_line
from deployments.cli.unreachable import unreachable

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0
"""Longest silence in seconds; a long prompt in a full queue waits for its first token."""


class ServerError(Exception):
    """The server refused or failed; the message is for the user."""


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

    def chat(self, model: str, messages: Sequence[dict[str, str]], **options: Any) -> Generator[str | Usage]:
        """Yield the text of one answer as it arrives, and its usage at the end. Close the iterator to stop it."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                _raise_for_status(response)
                yield from _read_events(response.iter_lines())
        except httpx.HTTPError as error:
            raise ServerError(self._unreachable(error)) from None

    def _unreachable(self, error: httpx.HTTPError) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
            return unreachable(self.url, error)
        return f"the connection to {self.url} broke: {one_line(error)}"


def _read_events(lines: Iterator[str]) -> Iterator[str | Usage]:
    """Yield text and usage from server-sent events. A stream that ends without [DONE] was cut off."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ServerError("the server sent something that is not JSON") from None
        if error := event.get("error"):
            raise ServerError(str(error.get("message", error) if isinstance(error, dict) else error))
        for choice in event.get("choices") or []:
            if text := (choice.get("delta") or {}).get("content"):
                yield text
        if usage := event.get("usage"):
            yield Usage.from_json(usage)
    raise ServerError("the answer was cut off: the server closed the connection")


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase or "no explanation"
    wait = response.headers.get("retry-after")
    hint = f", try again in {wait} s" if wait else ""
    raise ServerError(f"{message} (HTTP {response.status_code}{hint})")
