"""The client of `raydix top`: reads /metrics, /health and, with the admin key, the admin endpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from deployments.cli.errors import UserError, one_line
from deployments.telemetry.scrape import MetricsPage

TIMEOUT_S = 5.0
DECISIONS_ASKED = 50
NO_KEY = "needs the admin key: give --key-env or --key"


class TopClientError(Exception):
    """A reading failed; the message says why, but not where. `is_temporary` if trying again may help."""

    def __init__(self, message: str, is_temporary: bool) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


@dataclass(frozen=True, slots=True)
class ServerReading:
    """What a server reported at one moment."""

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
    """What could not be read, with the reason."""


class TopClient:
    """Reads one server. A context manager; `read` raises only `TopClientError`.

    Without a key, closed endpoints are not requested, as each attempt would count as a refused request.
    """

    def __init__(self, url: str, key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._has_key = key is not None
        self._closed = {} if key is not None else {"cluster status": NO_KEY, "router decisions": NO_KEY}
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
        status = self._json("/v1/cluster/status", "cluster status", hidden)
        decisions = self._json(f"/v1/router/decisions?limit={DECISIONS_ASKED}", "router decisions", hidden)
        records = decisions.get("data") if decisions is not None else None
        listed = records if isinstance(records, list) else None
        return ServerReading(at, clock, page, health or {}, status, listed, hidden | self._closed)

    def _page(self) -> MetricsPage:
        try:
            response = self._http.get("/metrics")
        except httpx.UnsupportedProtocol as error:
            raise TopClientError(f"this is not the URL of a server: {one_line(error)}", False) from None
        except httpx.HTTPError as error:
            raise TopClientError(f"{one_line(error)}. Is `raydix serve` running there?", True) from None
        if response.status_code in (401, 403):
            raise TopClientError(f"/metrics is protected: {_message(response)} {self._advice()}", False)
        if response.status_code >= 500:
            raise TopClientError(f"HTTP {response.status_code} instead of metrics: is it starting?", True)
        try:
            page = MetricsPage.parse(response.text) if response.is_success else None
        except ValueError:
            page = None
        if page is None or not page.is_raydix:
            raise TopClientError("this is not a Raydix server: /metrics has none of its metrics", False)
        return page

    def _advice(self) -> str:
        return "Check --key-env or --key." if self._has_key else "Give --key-env or --key."

    def _json(self, path: str, what: str, hidden: dict[str, str]) -> dict[str, Any] | None:
        """Return a JSON object, or None with the reason in `hidden`."""
        if what in self._closed:
            return None
        try:
            response = self._http.get(path)
            if response.status_code in (401, 403) and "admin_key_not_configured" not in response.text:
                raise TopClientError(f"{path} refuses this key: {_message(response)} {self._advice()}", False)
            if response.status_code == 403:
                self._closed[what] = _message(response)
                return None
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


def _message(response: httpx.Response) -> str:
    """Return the message of an OpenAI error object."""
    try:
        return one_line(Exception(response.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
