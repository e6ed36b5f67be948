"""Runs one generating request from its plan to its answer, in the same way for all endpoints, streamed or whole.

Nothing is sent before the first event arrives, so an error until then has its proper status. After that a stream
can only report an error as its last event.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from deployments.admission.rate_limits import RateLimited, Ticket
from deployments.api.base.errors import ApiError, from_client, log_failure, unexpected
from deployments.api.generation.answer_events import AnswerEvents
from deployments.api.generation.continuation import Continuation
from deployments.api.generation.generation_plan import GenerationPlan, Hints, engine_requests, reported_stops
from deployments.api.http.pacing import Pace, Turns
from deployments.api.http.transport import EventStream, json_in_pieces
from deployments.api.output.choice import ChoiceDelta, Group
from deployments.api.output.choices import Choices
from deployments.api.record.request_record import GenerationStart, RequestRecord
from deployments.api.record.timings import timings_of
from deployments.api.sampling.best_of import best
from deployments.api.streams.asked import AskedStream
from deployments.client.protocol import (
    EndsEngines,
    FailsSteps,
    Overloaded,
    Rejected,
    ReplicaLost,
    TakenOver,
    Unavailable,
)
from deployments.config.limits import Limits
from deployments.config.tenants import Tenant
from deployments.wire.deadlines.time_limit import TimeLimit

_TOKEN_BYTES = 40
"""Bytes that a request's record keeps for each token of the prompt until the answer was sent."""
CLIENT_ERRORS = (Rejected, Overloaded, Unavailable, ReplicaLost, FailsSteps, EndsEngines, TakenOver, RateLimited)


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that sent the request, and the request's use of its limits."""

    tenant: Tenant
    ticket: Ticket


class Exchange:
    """Runs one plan. `respond` closes everything that it opened, or leaves that to the stream it returns."""

    def __init__(
        self,
        limits: Limits,
        plan: GenerationPlan,
        record: RequestRecord,
        request_id: str,
        hints: Hints,
        caller: Caller,
        pace: Pace,
        stream: AskedStream | None = None,
    ) -> None:
        """`stream` is the one that any ingress can continue; None: the answer is none."""
        self._limits = limits
        self._encoder = plan.encoder
        self._record = record
        self._request_id = request_id
        self._is_stream = bool(plan.request.stream)
        self._pace = pace
        parts = [] if plan.echoes_only else engine_requests(plan, hints, caller.tenant, stream)
        self._count_field = plan.count_field or ("n" if plan.request.best_of is None else "best_of")
        self._num_sequences = len(plan.encoder.context.prompts) * plan.num_candidates if parts else 0
        self._hints, self._ticket = hints, caller.ticket
        self._num_prompt_tokens = plan.encoder.context.num_prompt_tokens
        # A beam search sends nothing before its end, and a request of a batch while others need the engines.
        is_silent = plan.sampling.beams is not None or hints.is_deferrable
        idle_timeout_s = limits.request_timeout_s if is_silent else limits.idle_timeout_s
        # In a cache that tenants share, a tenant may see only the prefixes of the configuration.
        reported = plan.served.shared.longest if caller.tenant.shares_cache else _all_cached
        self._choices = Choices(
            plan.served.client,
            parts,
            idle_timeout_s,
            scores_only=plan.scores_only,
            max_cached=reported,
            stop_ids=reported_stops(plan),
            pools=plan.sampling.pooling is not None,
            is_singly=stream is not None and plan.encoder.takes_singly,
        )
        self._scores = plan.scores
        requests = [request for request, _ in parts]
        self._continuation = Continuation(stream, plan.served.client, requests, limits.request_timeout_s)
        ids = self._continuation.ids(plan.encoder.context, caller.tenant.name)
        self._events = AnswerEvents(limits, plan, self._choices, ids, self._continuation.position)
        self._start = GenerationStart(plan.encoder.context, plan.sampling, self._is_stream, self._choices)
        self._num_echoed = len(plan.encoder.context.prompts) * (plan.request.n or 1) if plan.echoes_only else 0
        self._limit = TimeLimit(total_s=limits.request_timeout_s)
        self._turns: Turns | None = None
        self._on_end = plan.on_end
        self._held, self._num_held = plan.held, plan.num_held

    async def respond(self) -> Response:
        """Return the answer. Raises `ApiError` when the request fails before its first event."""
        self._record.accepted(self._start)
        is_handed_over = False
        try:
            with self._limit:
                found = await self._continuation.found()
                if self._continuation.is_continued:
                    self._continuation.begin()
                self._admit()
                await self._choices.open(found)
                groups = self._groups()
                if not self._is_stream:
                    return await self._whole(groups)
                first, waiting = None, b""
                if (position := self._continuation.position) is not None:
                    waiting = await self._events.replayed(position)
                else:
                    first = await anext(groups)
                if self._continuation.is_continued:
                    self._record.metrics.resumed(self._continuation.outcome)
            self._turns = self._pace.open()
            answer = EventStream(
                self._sent(first, waiting, groups),
                self._close,
                self._limits.slow_reader_timeout_s,
                self._headers(),
            )
            self._continuation.begin()
            is_handed_over = True
            return answer
        except CLIENT_ERRORS as error:
            self._record.refused(error)
            self._ticket.refuse()
            raise from_client(error, self._request_id) from None
        except TimeoutError:
            raise self._too_long() from None
        finally:
            if not is_handed_over:
                await self._release()

    def _admit(self) -> None:
        """Charge the tenant's limits, for an adopted stream only its generations. Raises `RateLimited`, or
        `Rejected` when they never allow it; `ApiError` 429 when there is no room for the memory of the answer.
        """
        if self._held is not None:
            self._held.take(self._num_held)
        is_adopted = self._continuation.is_adopted
        num_tokens = 0 if is_adopted else self._num_prompt_tokens
        try:
            self._ticket.admit(self._num_sequences, num_tokens, is_charged=not is_adopted)
        except ValueError as error:
            raise Rejected(f"{error}.", self._count_field) from None
        self._record.metrics.prompt(num_tokens)

    def _groups(self) -> AsyncIterator[Group]:
        """Return an iterator over all groups; for an echo, over one final group per choice."""
        groups = self._choices.groups(self._received) if self._choices.choices else self._echoes()
        return groups if self._scores is None else self._scores.gathered(groups)

    async def _echoes(self) -> AsyncIterator[Group]:
        for index in range(self._num_echoed):
            yield Group(index, (), [ChoiceDelta(index, "", (), (), "length")], "length")

    def _received(self, group: Group) -> None:
        """Record and charge a group that was read, except for tokens that were generated for an earlier reader."""
        num_tokens, ended = self._continuation.num_new(group), group.finish_reason
        self._record.received(group.index, num_tokens, is_last=ended is not None)
        self._ticket.generated(num_tokens)
        if ended:
            self._record.metrics.reasoned(self._choices.choices[group.index].num_reasoning)

    async def _whole(self, groups: AsyncIterator[Group]) -> Response:
        answer = self._encoder.context
        by_choice: list[list[ChoiceDelta]] = [[] for _ in range(self._num_echoed or len(self._choices.choices))]
        async for group in groups:
            by_choice[group.index] += group.deltas
        if len(by_choice) > len(answer.prompts) * answer.num_choices:
            by_choice = best(self._choices.choices, by_choice, len(answer.prompts), answer.num_choices)
        extras = partial(self._extras, is_whole=True)
        pieces = await self._events.encode(lambda: self._encoder.whole(by_choice, extras()))
        if self._on_end is not None:
            pieces = [*await self._on_end(pieces)]
        self._record.finished(by_choice[0][-1].finish_reason or "stop")
        return json_in_pieces(pieces, self._headers(), _TOKEN_BYTES * self._num_prompt_tokens)

    async def _sent(
        self, group: Group | None, waiting: bytes, groups: AsyncIterator[Group]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the stream's bytes from the first group, or from `waiting` ones; a failure is the last event.

        Events that are available together are sent together: a choice's opening with its first delta, the end with
        the last one.
        """
        assert self._turns is not None
        reason = "stop"
        try:
            while True:
                ended = None
                if group is not None:
                    waiting += await self._events.of(group)
                    ended = group.finish_reason
                    reason = ended or reason
                is_sent = bool(waiting) and not ((group is None or ended) and self._choices.are_over)
                if is_sent:
                    yield waiting
                    waiting = b""
                with self._limit:
                    if is_sent:
                        await self._turns.wait(len(self._choices.choices))
                    group = await anext(groups, None)
                if group is None:
                    break
            if len(waiting) > self._limits.inline_body_bytes:
                yield waiting
                waiting = b""
            end = await self._events.end(self._extras(is_whole=False))
            position = self._continuation.position
            if self._on_end is not None and (position is None or not position.at_end):
                (end,) = await self._on_end([end])
            end = self._events.ended(end)
            self._continuation.outlives_reader = False
            self._record.finished(reason)
            if waiting or end:
                yield waiting + end
        except Exception as error:
            self._continuation.outlives_reader &= isinstance(error, TakenOver)
            failure = self._failure(error)
            self._record.failed(failure.status, failure.type)
            yield await self._events.failure(partial(self._encoder.failure, failure, self._request_id))

    async def _close(self) -> None:
        """Clean up after the stream; if it did not end by itself, its client disconnected."""
        try:
            self._record.disconnected()
        finally:
            await self._release()

    async def _release(self) -> None:
        """Release everything that the request holds of its tenant, its ingress and the engines, even if a part
        fails."""
        try:
            self._limit.close()
            if self._held is not None:
                self._held.close()
            if self._turns is not None:
                self._turns.close()
        finally:
            try:
                self._ticket.close()
            finally:
                await (self._choices.detach() if self._continuation.is_kept else self._choices.aclose())

    def _extras(self, *, is_whole: bool) -> dict[str, Any]:
        """Return the fields that concern all choices: `usage` and `timings`, in a stream only those requested."""
        answer = self._encoder.context
        extras: dict[str, Any] = {}
        if is_whole or answer.include_usage:
            extras["usage"] = answer.usage(self._choices.choices)
        if answer.include_timings:
            extras["timings"] = timings_of(self._record)
        return extras

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TimeoutError):
            return self._too_long()
        if isinstance(error, CLIENT_ERRORS):
            return from_client(error, self._request_id)
        log_failure(error, f"the stream of request {self._request_id}")
        return unexpected(error, self._request_id)

    def _too_long(self) -> ApiError:
        limit = self._limits.request_timeout_s
        message = f"The request took longer than {limit:g} seconds (limits.request_timeout_s)."
        return ApiError(504, message, code="request_timeout")

    def _headers(self) -> dict[str, str]:
        """Return the tenant's limits, the first choice's replica and cache hits, and the decision if requested."""
        headers = self._ticket.headers()
        generation = self._choices.first
        if generation is None or generation.replica is None:
            return headers
        headers |= {
            "x-raydix-replica": generation.replica,
            "x-raydix-cached-tokens": str(self._choices.choices[0].num_cached),
        }
        decision = generation.explain() if self._hints.explains else None
        if decision is not None:
            headers["x-raydix-decision"] = json.dumps(decision, separators=(",", ":"))
        return headers


def _all_cached(prompt_ids: Sequence[int]) -> None:
    """Report all cached tokens of a prompt."""
