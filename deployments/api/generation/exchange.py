"""Runs one generating request from its plan to its answer, in the same way for all endpoints, streamed or whole.

Nothing is sent before the first event arrives, so an error until then has its proper status. After that a stream
can only report an error as its last event.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response

from deployments.admission.rate_limits import RateLimited, Ticket
from deployments.api.base.errors import ApiError, from_client, log_failure, unexpected
from deployments.api.base.off_loop import off_loop
from deployments.api.generation.generation_plan import GenerationPlan, Hints, engine_requests, reported_stops
from deployments.api.http.pacing import Pace, Turns
from deployments.api.http.transport import EventStream, json_in_pieces
from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.choices import Choices
from deployments.api.record.request_record import GenerationStart, RequestRecord
from deployments.api.record.timings import timings_of
from deployments.api.sampling.best_of import best
from deployments.client.protocol import (
    EndsEngines,
    FailsSteps,
    Overloaded,
    Rejected,
    ReplicaLost,
    Unavailable,
)
from deployments.config.limits import Limits
from deployments.config.tenants import Tenant
from deployments.wire.deadlines.time_limit import TimeLimit

T = TypeVar("T")
_TOKEN_BYTES = 40
"""Bytes that a request's record keeps for each token of the prompt until the answer was sent."""
CLIENT_ERRORS = (Rejected, Overloaded, Unavailable, ReplicaLost, FailsSteps, EndsEngines, RateLimited)


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
    ) -> None:
        self._limits = limits
        self._encoder = plan.encoder
        self._record = record
        self._request_id = request_id
        self._is_stream = bool(plan.request.stream)
        self._pace = pace
        parts = [] if plan.echoes_only else engine_requests(plan, hints, caller.tenant)
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
        )
        self._scores, self._num_top = plan.scores, plan.sampling.logprobs
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
                self._admit()
                await self._choices.open()
                deltas = self._deltas()
                if not self._is_stream:
                    return await self._whole(deltas)
                first = await anext(deltas)
            self._turns = self._pace.open()
            stream = EventStream(
                self._events(first, deltas),
                self._close,
                self._limits.slow_reader_timeout_s,
                self._headers(),
            )
            is_handed_over = True
            return stream
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
        """Charge the tenant's limits. Raises `RateLimited`, or `Rejected` when they never allow it; `ApiError` 429
        when there is no room for the memory of the answer.
        """
        if self._held is not None:
            self._held.take(self._num_held)
        try:
            self._ticket.admit(self._num_sequences, self._num_prompt_tokens)
        except ValueError as error:
            raise Rejected(f"{error}.", self._count_field) from None
        self._record.metrics.prompt(self._num_prompt_tokens)

    def _deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Return an iterator over all deltas; for an echo, over one final delta per choice."""
        deltas = self._choices.deltas(self._received) if self._choices.choices else self._echoes()
        return deltas if self._scores is None else self._scores.gathered(deltas)

    async def _echoes(self) -> AsyncIterator[ChoiceDelta]:
        for index in range(self._num_echoed):
            yield ChoiceDelta(index, "", (), (), "length")

    def _received(self, delta: ChoiceDelta) -> None:
        """Record and charge a delta that was read."""
        self._record.received(delta.index, len(delta.token_ids), is_last=delta.finish_reason is not None)
        self._ticket.generated(len(delta.token_ids))
        if delta.finish_reason:
            self._record.metrics.reasoned(self._choices.choices[delta.index].num_reasoning)

    async def _whole(self, deltas: AsyncIterator[ChoiceDelta]) -> Response:
        answer = self._encoder.context
        by_choice: list[list[ChoiceDelta]] = [[] for _ in range(self._num_echoed or len(self._choices.choices))]
        async for delta in deltas:
            by_choice[delta.index].append(delta)
        if len(by_choice) > len(answer.prompts) * answer.num_choices:
            by_choice = best(self._choices.choices, by_choice, len(answer.prompts), answer.num_choices)
        pieces = await self._encode(lambda: self._encoder.whole(by_choice, self._extras(is_whole=True)))
        if self._on_end is not None:
            pieces = [*await self._on_end(pieces)]
        self._record.finished(by_choice[0][-1].finish_reason or "stop")
        return json_in_pieces(pieces, self._headers(), _TOKEN_BYTES * self._num_prompt_tokens)

    async def _events(self, first: ChoiceDelta, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
        """Yield the stream's bytes; a failure is the last event.

        Events that are available together are sent together: a choice's opening with its first delta, the end with
        the last one.
        """
        assert self._turns is not None
        opened: set[int] = set()
        waiting = b""
        delta: ChoiceDelta | None = first
        try:
            while delta is not None:
                if delta.index not in opened:
                    opened.add(delta.index)
                    num_cached = self._choices.num_cached(delta.index)
                    waiting += await self._encode(partial(self._encoder.opening, delta.index, num_cached))
                if self._num_top is None:
                    waiting += self._encoder.delta(delta)
                else:
                    waiting += await self._with_logprobs(delta)
                is_sent = bool(waiting) and not (delta.finish_reason and self._choices.are_over)
                if is_sent:
                    yield waiting
                    waiting = b""
                with self._limit:
                    if is_sent:
                        await self._turns.wait(len(self._choices.choices))
                    last, delta = delta, await anext(deltas, None)
            if len(waiting) > self._limits.inline_body_bytes:
                yield waiting
                waiting = b""
            end = await self._encode_end(partial(self._encoder.end, self._extras(is_whole=False)))
            if self._on_end is not None:
                (end,) = await self._on_end([end])
            self._record.finished(last.finish_reason or "stop")
            yield waiting + end
        except Exception as error:
            failure = self._failure(error)
            self._record.failed(failure.status, failure.type)
            yield await self._encode_end(partial(self._encoder.failure, failure, self._request_id))

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
                await self._choices.aclose()

    async def _with_logprobs(self, delta: ChoiceDelta) -> bytes:
        """Encode a delta, whose log-probabilities may be many, as may be those that its events repeat."""
        assert self._num_top is not None
        encode = partial(self._encoder.delta, delta)
        repeats = delta.finish_reason is not None or bool(delta.calls)
        is_long = len(delta.logprobs) * (self._num_top + 1) > self._limits.inline_logprobs
        return await self._encode(encode) if repeats or is_long else encode()

    async def _encode_end(self, encode: Callable[[], bytes]) -> bytes:
        """Encode the end of a stream, which may repeat all log-probabilities of the answer."""
        return encode() if self._num_top is None else await self._encode(encode)

    async def _encode(self, encode: Callable[[], T]) -> T:
        """Encode a large part of the answer, in a thread when many log-probabilities or prompts make it slow."""
        num_logprobs = 0 if self._scores is None else self._scores.num_entries
        if self._num_top is not None:
            num_logprobs += (self._num_top + 1) * sum(choice.num_generated for choice in self._choices.choices)
        is_short = num_logprobs <= self._limits.inline_logprobs
        is_small = self._encoder.context.num_repeated <= self._limits.inline_body_bytes
        return encode() if is_short and is_small else await off_loop(encode)

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
