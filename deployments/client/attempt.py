"""One attempt to run a request at one replica: placed, sent over the wire, followed to its end or its failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from deployments.client.attempt_failure import AttemptFailure, LossReason
from deployments.client.futures import retrieve
from deployments.client.outgoing import TURN_TOKENS, message_of, origin_of
from deployments.client.stream import Stream
from deployments.client.suspects import Blame, Suspects
from deployments.client.timeline import ReplicaSpan
from deployments.wire.connection import WireConnection
from deployments.wire.deadlines.deadline import awake_now
from deployments.wire.messages import CLEARED_TOKENS, Generate, KVOrigin, NotRun, TakeOver, Trial
from deployments.wire.turn_budget import TurnBudget
from engine.values.stream_delta import STEP_FAILED, StreamDelta
from router.addresses import KVAddress
from router.decisions import as_json
from router.fleet import Fleet
from router.placer import Placer


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Timeouts and periods of an ingress's client, in seconds."""

    accept_s: float = 30.0
    """Longest wait for a replica to accept or refuse."""
    tick_s: float = 0.1
    """Time between two checks of every connection."""
    repeat_s: float = 1.0
    """Time after which an unanswered message is sent again, because a broken connection may have lost it."""


@dataclass(slots=True)
class DispatchContext:
    """State that all attempts of an ingress at one model share. `RemoteEngines` owns it, and calls `changed`."""

    fleet: Fleet
    placer: Placer
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Open attempts, by their id on the wire."""
    connections: dict[str, WireConnection] = field(default_factory=dict)
    """Connections, by replica."""
    suspects: Suspects = field(default_factory=Suspects)
    expects_engines: bool = False
    """Whether to wait for a replica while there is none: one has answered, and the model is not unloaded."""
    resumptions: TurnBudget = field(default_factory=lambda: TurnBudget(TURN_TOKENS))
    """Tokens of streams that resume elsewhere: all streams of a replica lose it in one turn of the event loop."""
    _sent_to: dict[str, dict[str, Attempt]] = field(default_factory=dict, init=False)
    """Open attempts by replica and id, in the order sent; replicas without any are omitted."""
    _reachable: tuple[int, frozenset[str]] | None = field(default=None, init=False)
    """The result of `reachable` at this version of the fleet, until a connection changes."""

    def place(self, attempt: Attempt, replica: str) -> None:
        """Note that an attempt is sent to a replica."""
        self._take_back(attempt)
        self._sent_to.setdefault(replica, {})[attempt.wire_id] = attempt

    def end(self, attempt: Attempt) -> None:
        """Forget an attempt that has ended."""
        self._take_back(attempt)
        self.attempts.pop(attempt.wire_id, None)
        self.suspects.remove(attempt.wire_id)

    def sent_to(self, replica: str | None) -> list[Attempt]:
        """Return the open attempts that were sent to a replica, in that order. O(their number)."""
        return list(self._sent_to.get(replica or "", {}).values())

    @property
    def in_use(self) -> Set[str]:
        """The replicas to which open attempts were sent."""
        return self._sent_to.keys()

    def _take_back(self, attempt: Attempt) -> None:
        sent = self._sent_to.get(attempt.placed or "")
        if sent is None:
            return
        sent.pop(attempt.wire_id, None)
        if not sent:
            self._sent_to.pop(attempt.placed or "", None)

    def reachable(self) -> frozenset[str]:
        """Return the replicas to which a request can be sent: members of the fleet that are connected and answer.

        O(replicas) after a change of one of them, else O(1).
        """
        version = self.fleet.version
        if self._reachable is None or self._reachable[0] != version:
            connected = {replica for replica, connection in self.connections.items() if not connection.is_lost}
            members = self.fleet.addresses().keys() & connected
            self._reachable = version, frozenset(members - self.fleet.lost())
        return self._reachable[1]

    def explain(self, wire_id: str) -> dict[str, Any] | None:
        """Return the router's record of an attempt's placement, if it is still kept."""
        record = self.placer.decision(wire_id)
        return None if record is None else as_json(record)

    def changed(self) -> None:
        """Note that a connection was opened or closed, is lost or answers again."""
        self._reachable = None

    def lose(self, replica: str | None, loss: LossReason, reason: str) -> None:
        """Fail all attempts at a replica immediately. The replica counts as lost until its next message, or, if
        its process is reported gone, until it answers.

        Unless it was silent or was being stopped, one of its requests may have ended it.
        """
        attempts = self.sent_to(replica)
        connection = self.connections.get(replica or "")
        is_stopping = connection is not None and connection.load.is_draining
        has_died = loss != "silent" and not is_stopping
        suspects = [attempt for attempt in attempts if attempt.trial is not None]
        for attempt in attempts:
            attempt.lose(loss, reason, attempt.blame(suspects) if has_died else None)
        if connection is not None and loss == "died":
            connection.doubt()
        elif connection is not None:
            connection.suspect()

    def fail_step(self, replica: str, attempts: Sequence[Attempt]) -> None:
        """Fail the attempts whose step failed. The replica lives, but each of them may also fail the next step.

        A trial next to requests that have just begun proves nothing: they may have failed the step as well.
        """
        suspects = [one for one in attempts if one.trial is not None or one.num_received < CLEARED_TOKENS]
        if not any(attempt.trial == "alone" for attempt in suspects):
            self.fleet.record_call(replica, is_failure=True)
        for attempt in attempts:
            attempt.lose("step_failed", "a step of its engine failed", attempt.blame(suspects))


class Attempt:
    """Sends a stream's request, with all tokens received so far, to one replica; none of `avoid` if possible."""

    def __init__(
        self,
        dispatch: DispatchContext,
        stream: Stream,
        number: int,
        avoid: tuple[str, ...],
        trial: Trial | None = None,
        on_cleared: Callable[[], None] = lambda: None,
        before: AttemptFailure | None = None,
        runs_at: str | None = None,
    ) -> None:
        """`trial` is how a suspect runs, and `on_cleared` is called when it is cleared; None for all others.
        `before` is the failure of the attempt before it. `runs_at` is the replica that already runs this attempt
        for another reader.
        """
        self.stream = stream
        self.trial: Trial | None = trial
        """How a suspect runs; None for a request that is not suspected, or is cleared."""
        self.replica: str | None = None
        """Replica that runs the request; None until its first message arrives."""
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the first token (or the end) has arrived."""
        self.is_muted = False
        """Whether another attempt won, so that further deltas of this one are dropped."""
        self._dispatch, self._avoid, self._on_cleared, self._before = dispatch, avoid, on_cleared, before
        self.runs_at = runs_at
        self.num_handed_over = 0
        """Tokens whose KV its replica has received from the one before; known with the first token."""
        self._base = stream.journal.num_tokens  # tokens received before; the replica counts later ones
        self._sent_at, self._asked_at = time.monotonic(), awake_now()
        self._is_behind = False
        self._span: ReplicaSpan | None = None
        self._outcome: asyncio.Future[AttemptFailure | None] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(retrieve)
        self._target: str | None = None
        self._is_open = self._is_handed_over = False
        self._message: Generate | TakeOver | None = None
        # Each attempt has its own id, so that late tokens of an earlier replica do not count as this one's.
        suffix = f"~{number}" if number else ""
        self._request = stream.journal.resumed(stream.request.request_id + suffix)
        self.wire_id = self._request.request_id
        """The request's id on the wire."""
        # With a bound method, which refers to the stream, only garbage collection would free an ended attempt.
        self._explain = partial(dispatch.explain, self.wire_id)

    @property
    def num_received(self) -> int:
        """Number of tokens received from this attempt."""
        return 0 if self.is_muted else self.stream.journal.num_tokens - self._base

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV its replica has: the prompt and what was generated."""
        return len(self._request.prompt_ids) + self.stream.journal.num_tokens

    @property
    def placed(self) -> str | None:
        """Replica that runs the request, or to which it was sent; None while it was sent to none."""
        return self.replica or self._target

    @property
    def unanswered(self) -> Generate | TakeOver | None:
        """The message sent, while the replica has not answered it."""
        return self._message if self.replica is None and not self._outcome.done() else None

    def repeat(self, now: float, after_s: float) -> None:
        """Send again what the replica has not answered in time: the request, or that tokens are missing. `now` is
        the event loop's awake time.
        """
        connection = self._dispatch.connections.get(self.placed or "")
        if connection is None or now - self._asked_at < after_s:
            return
        self._asked_at = now
        try:
            if (message := self.unanswered) is not None:
                connection.generate(message)
            elif self._is_behind and not self.stream.has_ended:
                connection.resume({self.wire_id: self.num_received})
        except Exception as error:
            self._break_off(error)

    def send(self) -> None:
        """Place the request and send it, unless that was done. `run` must follow, which reports a failure, or
        `withdraw`.
        """
        if self._is_open:
            return
        self._is_open = True
        try:
            self._dispatch.fleet.open(self.wire_id, is_deferrable=self._request.is_deferrable)
            self._dispatch.attempts[self.wire_id] = self
            failure = self._send()
        except Exception as error:
            return self._break_off(error)
        if failure is not None:
            self._finish(failure)

    async def run(self) -> AttemptFailure | None:
        """Run the attempt. Return None when the stream has ended, else the reason why it has not.

        Raises any error of a step of this attempt, in whichever task the step ran.
        """
        self.send()
        generated: list[int] = []
        try:
            failure = await self._outcome
            if failure is None and not self.is_muted:
                generated = self.stream.journal.token_ids[self._base :]
            if failure is not None and failure.loss is not None:
                self._abort()
            return failure
        except BaseException:
            self._abort()
            raise
        finally:
            self._end(generated)

    def withdraw(self) -> None:
        """Abort the attempt if it was sent and never ran, because its task was cancelled before it began."""
        if self._is_open:
            try:
                self._abort()
            finally:
                self._end([])

    def _end(self, generated: list[int]) -> None:
        self._is_open = False
        self._dispatch.end(self)
        self._dispatch.placer.release(self.wire_id, generated)

    def _send(self) -> AttemptFailure | None:
        """Place the request and send it. Return the failure when that is not possible."""
        dispatch, request = self._dispatch, self._request
        candidates: Set[str] = dispatch.reachable()
        if self.runs_at is not None:
            candidates &= {self.runs_at}
        if self.trial == "alone" and candidates:
            candidates = dispatch.suspects.free(candidates)
            if not candidates:
                return AttemptFailure("queue_full", "every replica runs another suspect")
        order = dispatch.placer.order(request, candidates, self._avoid)
        if not order:
            return AttemptFailure("absent", "no engine replica is up")
        dispatch.place(self, order[0])
        self._target = order[0]
        self._is_handed_over = dispatch.placer.is_handed_over(self.wire_id) and request.is_stream
        self.stream.placed()
        if self.trial is not None:
            dispatch.suspects.place(self.wire_id, self._target)
        try:
            number = dispatch.fleet.dispatch_number(self.wire_id)
            if self.runs_at is not None:
                self._message = TakeOver(number, self.wire_id)
            else:
                self._message = message_of(request, number, trial=self.trial, origin=self._origin())
            if not dispatch.connections[self._target].generate(self._message):
                return self._loss("silent", "it does not take in messages")
        except (ValueError, OverflowError) as error:
            return AttemptFailure("never_fits", str(error), self._target)
        return None

    def _origin(self) -> KVOrigin | None:
        """Return the replica that can lend KV: the previous one if it still has all of it, else the best one."""
        before, request = self._before, self._request
        if before is not None and before.kv is not None:
            return origin_of(before.kv, len(request.prompt_ids) + len(request.output_ids))
        planned = self._dispatch.placer.planned_fetch(self.wire_id)
        if planned is None or planned.address is None:
            return None
        return origin_of(planned.address, planned.num_tokens)

    @property
    def may_leave(self) -> bool:
        """Whether its stream has begun here and may resume elsewhere."""
        is_running = bool(self.num_received) and not self.stream.has_ended and not self._outcome.done()
        return is_running and self.trial is None

    def leave(self, kv: KVAddress) -> None:
        """End the attempt, because its replica leaves; the next one fetches its KV."""
        self._finish(AttemptFailure("lost", "it leaves", self.placed, loss="drained", kv=kv))

    def feed(self, replica: str, delta: StreamDelta) -> bool:
        """Apply a delta. Return False when tokens before it are missing and must be requested again.

        A defect ends only this stream: the message that brought the delta has other streams' tokens, too.
        """
        try:
            self._is_behind = not self._feed(replica, delta)
        except Exception as error:
            self._break_off(error)
            return True
        if self._is_behind:
            self._asked_at = awake_now()
        return not self._is_behind

    def _feed(self, replica: str, delta: StreamDelta) -> bool:
        if self.is_muted:
            return True
        if self.replica is None:
            self._dispatch.place(self, replica)
            self.replica = replica
            self.stream.accept(replica, self._explain)
        if delta.error_code == STEP_FAILED:  # it ends the attempt (`fail_step`), not the stream
            delta = structs.replace(delta, finish_reason=None, error=None, error_code=None)
        if delta.is_empty:
            return True
        delta.start += self._base  # The replica counts from the start of this attempt.
        now = time.monotonic()
        if not delta.token_ids and delta.finish_reason is None:  # The prompt's log-probabilities arrive first.
            return self.stream.feed(delta, now)
        if not self.began.done():
            self.began.set_result(None)
            self._dispatch.fleet.record_call(replica, is_failure=False)
            self._dispatch.placer.settle(self.wire_id, delta.num_cached)
            if self._before is not None and self._before.kv is not None:
                decision = self._dispatch.placer.decision(self.wire_id)
                held = 0 if decision is None else decision.predicted_cached
                self.num_handed_over = max(0, delta.num_cached - held)
        if self.stream.has_ended:
            self._finish(None)
            return True
        has_rival = self.stream.journal.num_tokens > self._base
        if not self.stream.feed(delta, now):
            return False
        if self._span is None and not has_rival:
            self._span = ReplicaSpan(replica, self._sent_at, now, now)
            self.stream.begin(self._span, self._explain)
        if self._span is not None:
            self._span.feed(delta, now)
        if self.trial is not None and self.num_received >= CLEARED_TOKENS:
            self._clear()
        if delta.finish_reason is not None:
            self._finish(None)
        elif self._is_handed_over and self.trial is None:
            self._hand_over(replica)
        return True

    def _hand_over(self, replica: str) -> None:
        """Have another replica resume the stream after the first tokens, if this one lends its KV."""
        kv = self._dispatch.connections[replica].address.kv
        if kv is not None:
            reason = "it only computes prompts"
            self._finish(AttemptFailure("lost", reason, self.placed, loss="handed_over", kv=kv))

    def _clear(self) -> None:
        """Clear the request of suspicion: it runs past the point at which a replica died."""
        self.trial = None
        self._dispatch.suspects.remove(self.wire_id)
        self._on_cleared()

    def refuse(self, message: NotRun) -> None:
        """Fail the attempt: its replica refused the request, or cannot continue it."""
        kind, is_failure = message.kind, message.kind in ("failed", "engine_ended")
        if kind == "taken":
            self.stream.give_up()
            return self._finish(None)
        try:
            self._dispatch.fleet.record_call(self.placed or "", is_failure=is_failure)
        except Exception as error:
            return self._break_off(error)
        if kind == "engine_ended":  # The report is for all its requests, whose blame is decided together.
            return self._dispatch.lose(self.placed, "failed", message.reason)
        if kind == "failed":
            return self.lose("failed", message.reason)
        return self._finish(AttemptFailure(kind, message.reason, self.placed, message.retry_after_s))

    def lose(self, loss: LossReason, reason: str, blame: Blame | None = None) -> None:
        """Fail the attempt: its replica no longer answers, or does not know the request."""
        self._finish(self._loss(loss, reason, blame))

    def blame(self, suspects: Sequence[Attempt]) -> Blame | None:
        """Return the request's part in its replica's death; `suspects` are those that were sent there.

        Where a suspect ran as the only one, no other request that ran there is to blame.
        """
        if any(suspect.trial == "alone" and suspect.replica is not None for suspect in suspects):
            if self not in suspects:
                return None
            return "certain" if len(suspects) == 1 else "possible"
        return "possible" if self.num_received < CLEARED_TOKENS else "unlikely"

    def _finish(self, failure: AttemptFailure | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(failure)

    def _break_off(self, error: Exception) -> None:
        """End the attempt and its stream because of a defect."""
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def _loss(self, loss: LossReason, reason: str, blame: Blame | None = None) -> AttemptFailure:
        return AttemptFailure("lost", reason, self.placed, loss=loss, blame=blame)

    def _abort(self) -> None:
        """Abort the request in the engine, which may run it even though it seemed lost, or leave it running."""
        connection, farewell = self._dispatch.connections.get(self.placed or ""), self.stream.farewell
        if connection is None or farewell == "nothing":
            return
        if farewell == "detach" and connection.keeps_streams:
            connection.detach(self.wire_id)
        else:
            connection.abort(self.wire_id)
