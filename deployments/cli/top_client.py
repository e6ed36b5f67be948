"""The client of `raydix top`: reads /metrics, /health and the other pages that its key permits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from deployments.cli.errors import UserError, one_line
from deployments.telemetry.scrape import MetricsPage

TIMEOUT_S = 5.0
DECISIONS_ASKED = 50
NO_KEY = "needs a key: give --key-env or --key"
NO_ADMIN_KEY = "needs the admin key: give --key-env or --key"
NONE_SET = "needs an admin key, and the server has none: set admin_key_hash in its config, see raydix hash-key"


class TopClientError(Exception):
    """A reading failed; the message says why, but not where. `is_temporary` if trying again may help."""

    def __init__(self, message: str, is_temporary: bool) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A server's reports at one moment."""

    at: float
    """Unix seconds."""
    clock: float
    """Monotonic seconds, by which intervals are measured."""
    page: MetricsPage
    health: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] | None = None
    """/v1/cluster/status; None while hidden."""
    decisions: list[Any] | None = None
    """/v1/router/decisions, newest first; None while hidden."""
    hidden: dict[str, str] = field(default_factory=dict)
    """Pages that could not be read, with the reason."""


class TopClient:
    """Reads one server. A context manager; `read` raises only `TopClientError`.

    Without a key, pages that /health reports as closed are not requested, because each attempt would count as a
    refused request.
    """

    def __init__(self, url: str, key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._has_key = key is not None
        self._closed: dict[str, str] = {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(f"{url!r} is not a URL: {one_line(error)}", 2) from None

    def __enter__(self) -> TopClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def read(self) -> ServerReading:
        """Take one reading. Raises TopClientError when there is no metrics page or the key is refused."""
        page = self._page()
        at, clock = time.time(), time.monotonic()
        hidden: dict[str, str] = {}
        health = self._json("/health", "health", hidden)
        if not self._has_key:
            self._closed = _closed_without_key(health or {})
        status = self._json("/v1/cluster/status", "cluster status", hidden)
        decisions = self._json(f"/v1/router/decisions?limit={DECISIONS_ASKED}", "router decisions", hidden)
        records = decisions.get("data") if decisions is not None else None
        listed = records if isinstance(records, list) else None
        return ServerReading(at, clock, page, health or {}, status, listed, hidden | self._closed)

    def _page(self) -> MetricsPage:
        try:
            response = self._http.get("/metrics")
        except httpx.UnsupportedProtocol as error:
            said = "this is not the URL of a server: expected one such as http://127.0.0.1:8000"
            raise TopClientError(said, False) from error
        except httpx.HTTPError as error:
            raise TopClientError(f"{one_line(error)}. Is `raydix serve` running there?", True) from None
        if response.status_code in (401, 403):
            raise TopClientError(f"/metrics is protected: {self._refusal(response)}", False)
        if response.status_code >= 500:
            raise TopClientError(f"HTTP {response.status_code} instead of metrics: is the server starting?", True)
        try:
            page = MetricsPage.parse(response.text) if response.is_success else None
        except ValueError:
            page = None
        if page is None or not page.is_raydix:
            raise TopClientError("this is not a Raydix server: /metrics has none of its metrics", False)
        return page

    def _refusal(self, response: httpx.Response) -> str:
        """Return the server's message and a remedy, unless the server has no key that a client could send."""
        if _has_no_admin(response):
            return _message(response)
        advice = "Check --key-env or --key." if self._has_key else "Give --key-env or --key."
        return f"{_message(response)} {advice}"

    def _json(self, path: str, what: str, hidden: dict[str, str]) -> dict[str, Any] | None:
        """Return a JSON object, or None with the reason in `hidden`."""
        if what in self._closed:
            return None
        try:
            response = self._http.get(path)
            if _has_no_admin(response):
                self._closed[what] = NONE_SET
                return None
            if response.status_code in (401, 403):
                raise TopClientError(f"{path} refuses this key: {self._refusal(response)}", False)
            answer = response.json()
        except httpx.HTTPError as error:
            hidden[what] = one_line(error)
            return None
        except ValueError:
            answer = None
        if isinstance(answer, dict) and "error" not in answer:
            return answer
        hidden[what] = f"HTTP {response.status_code}"
        return None


def _closed_without_key(health: dict[str, Any]) -> dict[str, str]:
    """Return the pages that need a key, with the reasons."""
    has_admin, needs_key = health.get("has_admin_key") is not False, health.get("needs_key") is not False
    closed = {"router decisions": NO_ADMIN_KEY if has_admin else NONE_SET}
    if has_admin or needs_key:
        closed["cluster status"] = NO_ADMIN_KEY if has_admin else NO_KEY
    return closed


def _has_no_admin(response: httpx.Response) -> bool:
    return response.status_code == 403 and "admin_key_not_configured" in response.text


def _message(response: httpx.Response) -> str:
    """Return the message of an OpenAI error object."""
    try:
        return one_line(Exception(response.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
