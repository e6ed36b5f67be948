"""Generates responses in the background: each is a request to the API itself, with a client in this module.

    POST, background ─▶ checked, planned, admitted ─▶ job ─▶ "queued"
                                                       └─▶ the API, with the plan ─▶ events ─▶ job ─▶ readers

So it is limited, counted and logged like any other, and cancelled like a request with a disconnected client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Scope

from deployments.admission.rate_limits import Ticket
from deployments.api.base.errors import RETRY_AFTER_S, ApiError
from deployments.api.http.inner_request import inner_scope
from deployments.api.http.parts import PART_BYTES
from deployments.api.http.scopes import NO_READER
from deployments.api.responses.encoder import SERVER_STOPPED, ResponsesEncoder
from deployments.api.streams.asked import AskedStream
from deployments.config.tenants import ANONYMOUS

_JOB = "raydix.response_job"


class _Error(msgspec.Struct):
    message: str = "Internal error."
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class Keeper(Protocol):
    """Stores one response."""

    is_kept: bool
    """Whether it is stored as it was when that was last tried."""

    async def keep_end(self, events: bytes) -> None:
        """Store the response as it has ended, with the events of its stream."""

    async def leave(self) -> None:
        """Store the response no more, because another ingress continues it."""


class ResponseJob:
    """One response that is generated in the background."""

    def __init__(
        self,
        encoder: ResponsesEncoder,
        plan: Any,
        ticket: Ticket,
        keeper: Keeper,
        stream: AskedStream,
        *,
        keeps_events: bool,
    ) -> None:
        """The API generates by `plan`, as `stream`."""
        self.plan, self.ticket, self.stream = plan, ticket, stream
        self._encoder, self._keeper, self._keeps_events = encoder, keeper, keeps_events
        self._events: list[bytes] = []
        self._num_bytes = 0
        self._news = asyncio.Event()
        self._status = 0
        self._error = b""
        self._request_id = ""
        self._is_cancelled = self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self.has_ended = False

    def start(self, app: ASGIApp, scope: Scope, on_end: Callable[[], object]) -> None:
        """Begin to generate. `on_end` is called when all is over."""
        self._request_id = dict(scope["headers"])[b"x-request-id"].decode()
        self._task = asyncio.create_task(self._run(app, scope, on_end))

    async def planned(self, _: Any) -> Any:
        """Return the plan."""
        return self.plan

    def now(self) -> list[bytes]:
        """Return the response object as it is, as JSON in pieces."""
        return self._encoder.now()

    async def cancel(self, *, is_stopping: bool = False) -> None:
        """End it before its time, because its owner or the server says so, and wait until it has ended."""
        if self._task is None:
            return
        await asyncio.sleep(0)  # Now the task has begun; one cancelled earlier would not clean up.
        if not self._is_cancelled:
            self._is_cancelled, self._is_stopping = True, is_stopping
            self.stream.is_wanted = is_stopping  # Another ingress can continue it.
            self._task.cancel()
        await asyncio.wait([self._task])

    async def events(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of its stream whose sequence numbers are greater than `after`, as they come."""
        at = after + 1
        while True:
            if at < len(self._events):
                fresh, size = [self._events[at]], len(self._events[at])
                while (at := at + 1) < len(self._events) and size + len(self._events[at]) <= PART_BYTES:
                    fresh.append(self._events[at])
                    size += len(self._events[at])
                yield fresh[0] if len(fresh) == 1 else b"".join(fresh)
            elif self.has_ended:
                return
            else:
                await self._news.wait()

    async def number_of(self, event_id: str) -> int | None:
        """Return the number of the event with this id, once there is such an event; None if there is none."""
        at, head = 0, b"id: %b\n" % event_id.encode()
        while True:
            while at < len(self._events):
                if self._events[at].startswith(head):
                    return at
                at += 1
            if self.has_ended:
                return None
            await self._news.wait()

    @property
    def num_kept(self) -> int:
        """Number of bytes that its readers keep alive: its events, and the large ones of those to come."""
        num_held: int = self.plan.num_held
        return max(self._num_bytes, num_held, 0)

    @property
    def keeps_events(self) -> bool:
        """Whether its stream can be read."""
        return self._keeps_events

    async def _run(self, app: ASGIApp, scope: Scope, on_end: Callable[[], object]) -> None:
        try:
            try:
                await app(scope, _never, self._send)
            finally:
                self.ticket.close()
                self._finish()
                if self._encoder.is_moved:
                    await self._keeper.leave()
                elif self._encoder.is_failed or self._keeps_events or not self._keeper.is_kept:
                    await self._keeper.keep_end(b"".join(self._events))
        finally:
            self.has_ended = True
            self._tell()
            on_end()

    def _finish(self) -> None:
        """Record how it ended, if no answer did."""
        if self._encoder.final is not None or self._encoder.is_moved:
            return
        if self._status >= 400:
            error = _error_in(self._error)
            self._fail(ApiError(self._status, error.message, code=error.code))
        elif self._is_stopping:
            code = SERVER_STOPPED if self.stream.in_background else None
            self._fail(ApiError(503, "The server was stopped before the response was complete.", code=code))
        else:
            self._encoder.cancelled()

    def _fail(self, error: ApiError) -> None:
        """End it with an error, which its stream says too, whether it had begun or not."""
        opening = b"" if self._events else self._encoder.opening(0, 0)
        self._add(opening + self._encoder.failure(error, self._request_id))

    async def _send(self, message: Message) -> None:
        self._status = message.get("status", self._status)
        body = message.get("body", b"")
        if self._status >= 400:
            self._error += body
        else:
            self._add(body)

    def _add(self, events: bytes) -> None:
        if events and self._keeps_events:
            self._events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
            self._num_bytes += len(events)
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundResponses:
    """The responses that this process generates in the background."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._jobs: dict[tuple[str, str], ResponseJob] = {}

    @property
    def num_running(self) -> int:
        """Number of responses that have not ended."""
        return len(self._jobs)

    def check_room(self, tenant: str) -> None:
        """Raise `ApiError` 429 when there are as many as may be; where there are tenants, each may have half."""
        num_own = sum(owner == tenant for owner, _ in self._jobs)
        most_own = self._max_running if tenant == ANONYMOUS.name else self._max_running - self._max_running // 2
        if len(self._jobs) >= self._max_running or num_own >= most_own:
            message = (
                f"The server generates {len(self._jobs)} responses in the background, {num_own} of them yours, as "
                "many as it takes (responses.max_background); retry later."
            )
            headers = {"retry-after": f"{RETRY_AFTER_S:.0f}"}
            raise ApiError(429, message, code="overloaded", headers=headers)

    def add(self, tenant: str, name: str, job: ResponseJob) -> None:
        """Count a response that is to begin. Raises `ApiError` 429."""
        self.check_room(tenant)
        self._jobs[tenant, name] = job

    def remove(self, tenant: str, name: str) -> None:
        """Forget a response that has ended. Idempotent."""
        self._jobs.pop((tenant, name), None)

    def find(self, tenant: str, name: str) -> ResponseJob | None:
        """Return a response that has not ended."""
        return self._jobs.get((tenant, name))

    async def aclose(self) -> None:
        """End all: the server stops."""
        await asyncio.gather(*(job.cancel(is_stopping=True) for job in list(self._jobs.values())))


def job_of(scope: Scope) -> ResponseJob | None:
    """Return the job whose request this is; None for a client's."""
    return scope.get(_JOB)


def scope_of(job: ResponseJob, scope: Scope, request_id: str) -> Scope:
    """Return the scope of a job's own request, like that of the client's which asked for it."""
    return inner_scope(scope, scope["headers"], request_id, **{_JOB: job, NO_READER: True})


async def _never() -> Message:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # no client to leave


def _error_in(body: bytes) -> _Error:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        return _Error()
