"""One request at one replica: from the control call to its last token on the wire, or to why there is none."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from deployments.client import GenerateRequest
from deployments.generation import Stream
from deployments.wire_client import WireConnection
from router.fleet import Fleet


class ControlCall(Protocol):
    """An open `EngineReplica.generate` call."""

    async def result(self) -> dict[str, Any]:
        """Wait for its end: {"finish_reason", "num_tokens"} or {"refused", "reason", ...}."""
        ...

    def cancel(self) -> None:
        """End it."""
        ...


class Control(Protocol):
    """How requests reach engine replicas; the ingress's is a Serve handle, a test's a table of engines."""

    def generate(self, request: GenerateRequest, ingress_id: str, avoid: tuple[str, ...]) -> ControlCall:
        """Send a request to the replica the router picks, one of `avoid` only when there is no other."""
        ...


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Limits of waiting, in seconds."""

    accept_s: float = 30.0
    """For a replica to accept or refuse."""
    lost_after_s: float = 3.0
    """Silence after which a replica counts as lost."""
    delivery_s: float = 5.0
    """For the last tokens on the wire after the replica said that a request ended."""
    tick_s: float = 0.1
    """Between looks at every connection."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What all attempts of an ingress share; owned by its `WireEngineClient`."""

    ingress_id: str
    control: Control
    fleet: Fleet
    timings: ClientTimings
    streams: dict[str, Stream] = field(default_factory=dict)
    """By their id on the wire."""
    connections: dict[str, WireConnection] = field(default_factory=dict)
    """By replica."""


class Attempt:
    """Send a stream's request to one replica, none of `avoid` if it can be helped."""

    def __init__(self, desk: Desk, stream: Stream, number: int, avoid: tuple[str, ...]) -> None:
        self._desk, self._stream, self._avoid = desk, stream, avoid
        # An id of its own: what an earlier replica still sends must not be taken for this one's.
        suffix = f"~{number}" if number else ""
        self._request = replace(stream.request, request_id=stream.request.request_id + suffix)

    async def run(self) -> dict[str, Any] | None:
        """None when the stream has ended; else why not: a record with "refused", "reason" and "replica"."""
        desk, wire_id, stream = self._desk, self._request.request_id, self._stream
        desk.fleet.open(wire_id)
        stream.start_attempt()
        desk.streams[wire_id] = stream
        call = desk.control.generate(self._request, desk.ingress_id, self._avoid)
        try:
            record = await self._result(call)
            if "refused" not in record:
                record = await self._delivered(wire_id) or {}
            return {"replica": desk.fleet.placement(wire_id), **record} if record else None
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            desk.fleet.release(wire_id)
            desk.streams.pop(wire_id, None)

    async def _result(self, call: ControlCall) -> dict[str, Any]:
        """The control call's record; a call that fails, or whose replica falls silent, says "lost"."""
        result = asyncio.ensure_future(call.result())
        try:
            waited: list[asyncio.Future[Any]] = [result, self._stream.lost]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            call.cancel()
            return {"refused": "lost", "reason": self._stream.lost.result()}
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return {"refused": "lost", "reason": f"{type(error).__name__}"}
        finally:
            if not result.done():
                result.cancel()
            result.add_done_callback(_swallow)

    async def _delivered(self, wire_id: str) -> dict[str, Any] | None:
        """The engine is done with it: wait for its last tokens, asking for them once more if need be."""
        stream = self._stream
        for is_second in (False, True):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stream.ended.wait(), self._desk.timings.delivery_s / 2)
                return None
            connection = self._desk.connections.get(stream.replica or "")
            if not is_second and connection is not None:
                connection.resume({wire_id: stream.num_received})
        return {"refused": "lost", "reason": "its last tokens did not arrive"}


def _swallow(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
