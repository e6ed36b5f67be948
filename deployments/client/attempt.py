"""One attempt to run a request at one replica, from the control call to the last token or the failure."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from deployments.client.futures import retrieve
from deployments.client.protocol import CallOutcome, GenerateRequest, RefusalKind
from deployments.client.stream import Stream
from deployments.client.timeline import ReplicaSpan
from deployments.wire.connection import WireConnection
from engine.stream_delta import StreamDelta
from router.decisions import as_json
from router.fleet import Fleet
from router.placer import Placer


class ReplicaCall(Protocol):
    """An open `EngineReplica.generate` call."""

    async def result(self) -> CallOutcome:
        """Wait for the end of the call.

        Raises ReplicaDied when the replica's process is known to be gone, another exception when the call failed.
        """
        ...

    def cancel(self) -> None:
        """Cancel the call."""
        ...


class ReplicaDied(Exception):
    """The replica's process is gone."""


class Dispatcher(Protocol):
    """Sends requests to engine replicas: over a Serve handle in an ingress, to a table of engines in tests."""

    def generate(self, request: GenerateRequest, ingress_id: str, avoid: tuple[str, ...]) -> ReplicaCall:
        """Send a request to the replica that the router picks, to one of `avoid` only when there is no other."""
        ...


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Timeouts and periods of an ingress's client, in seconds."""

    accept_s: float = 30.0
    """Longest wait for a replica to accept or refuse."""
    delivery_s: float = 5.0
    """Longest wait for the last tokens on the wire after the replica said that a request ended."""
    tick_s: float = 0.1
    """Time between two checks of every connection."""


LossReason = Literal["died", "silent", "failed", "undelivered"]
"""Why a replica did not finish a request: its process is gone; it does not answer; the call to it failed, or it no
longer knows the request; it finished the request, but the last tokens did not arrive."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt did not finish its request: the replica refused the request, or was lost."""

    kind: RefusalKind | Literal["lost"]
    reason: str
    replica: str | None = None
    retry_after_s: float = 1.0
    """Seconds after which a retry is worthwhile when the queue was full."""
    loss: LossReason | None = None


@dataclass(frozen=True, slots=True)
class DispatchContext:
    """State that all attempts of an ingress at one model share; `RemoteEngines` owns it."""

    ingress_id: str
    dispatcher: Dispatcher
    fleet: Fleet
    placer: Placer
    timings: ClientTimings
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Open attempts, by their id on the wire."""
    connections: dict[str, WireConnection] = field(default_factory=dict)
    """Connections, by replica."""

    def lose(self, replica: str | None, loss: LossReason, reason: str) -> None:
        """Fail all attempts at a replica at once; the replica counts as lost until its next message."""
        for attempt in list(self.attempts.values()):
            if attempt.replica == replica:
                attempt.lose(loss, reason)
        if replica in self.connections:
            self.connections[replica].suspect()


class Attempt:
    """Sends a stream's request, with all tokens received so far, to one replica; none of `avoid` if possible."""

    def __init__(self, dispatch: DispatchContext, stream: Stream, number: int, avoid: tuple[str, ...]) -> None:
        self.stream = stream
        self.replica: str | None = None
        """Replica that runs the request; None until its first message arrives."""
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the first token (or the end) has arrived."""
        self.is_muted = False
        """Whether another attempt won, so that further deltas of this one are dropped."""
        self._dispatch, self._avoid = dispatch, avoid
        self._base = len(stream.journal)  # tokens received before this attempt: the replica counts from here
        self._sent_at = time.monotonic()
        self._span: ReplicaSpan | None = None
        self._lost: asyncio.Future[AttemptFailure] = asyncio.get_running_loop().create_future()
        # Each attempt has its own id, so that late tokens of an earlier replica are not taken for this one's.
        suffix = f"~{number}" if number else ""
        self._request = stream.journal.resumed(stream.request.request_id + suffix)

    @property
    def wire_id(self) -> str:
        """The request's id on the wire."""
        return self._request.request_id

    @property
    def num_received(self) -> int:
        """Number of tokens received from this attempt."""
        return 0 if self.is_muted else len(self.stream.journal) - self._base

    async def run(self) -> AttemptFailure | None:
        """Run the attempt. Return None when the stream has ended, else the reason why it has not."""
        dispatch = self._dispatch
        dispatch.fleet.open(self.wire_id)
        dispatch.attempts[self.wire_id] = self
        call = dispatch.dispatcher.generate(self._request, dispatch.ingress_id, self._avoid)
        generated: list[int] = []
        try:
            failure = await self._result(call) or await self._delivered()
            if failure is None and not self.is_muted:
                generated = self.stream.journal.token_ids[self._base :]
            return failure
        except asyncio.CancelledError:
            self._abort(call)
            raise
        finally:
            dispatch.placer.release(self.wire_id, generated)
            del dispatch.attempts[self.wire_id]

    def feed(self, replica: str, delta: StreamDelta) -> bool:
        """Apply a delta. Return False when tokens before it are missing and have to be requested again."""
        if self.is_muted:
            return True
        if self.replica is None:
            self.replica = replica
            self.stream.accept(replica, self._explain)
        if delta.is_empty:
            return True
        delta.start += self._base  # The replica counts from the start of this attempt.
        now = time.monotonic()
        if not delta.token_ids and delta.finish_reason is None:  # the prompt's log-probabilities come first
            return self.stream.feed(delta, now)
        if not self.began.done():
            self.began.set_result(None)
            self._dispatch.placer.settle(self.wire_id, delta.num_cached)
        if self.stream.ended.is_set():
            return True
        has_rival = len(self.stream.journal) > self._base
        if not self.stream.feed(delta, now):
            return False
        if self._span is None and not has_rival:
            self._span = ReplicaSpan(replica, self._sent_at, now, now)
            self.stream.begin(self._span, self._explain)
        if self._span is not None:
            self._span.feed(delta, now)
        return True

    def lose(self, loss: LossReason, reason: str) -> None:
        """Fail the attempt: its replica no longer answers, or does not know the request."""
        if not self._lost.done():
            self._lost.set_result(self._loss(loss, reason))

    async def _result(self, call: ReplicaCall) -> AttemptFailure | None:
        """Wait for the call or a loss. Return None when the replica reports that the request has ended."""
        result = asyncio.ensure_future(call.result())
        try:
            waited: list[asyncio.Future[Any]] = [result, self._lost]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                self._abort(call)
                return self._lost.result()
            outcome = result.result()
            self._dispatch.fleet.record_call(self._placed or "", is_failure=False)
            if outcome.refusal is None:
                return None
            return AttemptFailure(outcome.refusal, outcome.reason, outcome.replica, outcome.retry_after_s)
        except asyncio.CancelledError:
            raise
        except ReplicaDied as error:
            self._dispatch.lose(self._placed, "died", str(error))
            return self._loss("died", str(error))
        except Exception as error:
            self._dispatch.fleet.record_call(self._placed or "", is_failure=True)
            return self._loss("failed", type(error).__name__)
        finally:
            if not result.done():
                result.cancel()
            result.add_done_callback(retrieve)

    async def _delivered(self) -> AttemptFailure | None:
        """Wait for the last tokens of a request that the engine has finished; ask for them once more if needed."""
        for is_second in (False, True):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stream.ended.wait(), self._dispatch.timings.delivery_s / 2)
                return None
            connection = self._dispatch.connections.get(self.replica or "")
            if not is_second and connection is not None:
                connection.resume({self.wire_id: self.num_received})
        return self._loss("undelivered", "its last tokens did not arrive")

    @property
    def _placed(self) -> str | None:
        return self.replica or self._dispatch.fleet.placement(self.wire_id)

    def _explain(self) -> dict[str, Any] | None:
        record = self._dispatch.placer.decision(self.wire_id)
        return None if record is None else as_json(record)

    def _loss(self, loss: LossReason, reason: str) -> AttemptFailure:
        return AttemptFailure("lost", reason, self._placed, loss=loss)

    def _abort(self, call: ReplicaCall) -> None:
        """Abort the request in the engine: over the wire, which is faster, and by cancelling the call."""
        connection = self._dispatch.connections.get(self._placed or "")
        if connection is not None:
            connection.abort(self.wire_id)
        call.cancel()
