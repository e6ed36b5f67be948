"""Which tokens are computed next, and in whose memory.

One rule: a request is given tokens until `num_computed` reaches `num_tokens`. A step is filled in this order:

    decodes                 every running request with one token to compute
    the oldest prompt       at least a quarter of the prefill budget: it always gets on
    the other prompts       shortest remainder first: a 100k-token prompt does not hold up a 50-token one

`schedule` makes the step a value, `apply` takes its result in. Nothing else changes a request.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cache import CacheStats, KVCacheManager, OutOfPages, PageAccount, PageCopy
from engine.errors import NeverFits
from engine.load import EngineLoad
from engine.plan import Chunk, Event, FinishReason, StepPlan, StepResult, Timings, TokenLogprobs
from engine.prefill_budget import PrefillBudget
from engine.request import Request, Status
from engine.waiting_queue import WaitingQueue, precedence

# Prompts beyond this many in the queue are not looked at for the step's remaining room.
_WINDOW = 64
# The oldest prompt's guaranteed part of the prefill budget: one in this many tokens.
_OLDEST_SHARE = 4


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a scheduler; the fields of the same names in `EngineConfig` say what they mean."""

    max_model_len: int
    max_running: int = 256
    max_step_tokens: int = 2048
    max_waiting: int = 1024
    max_waiting_tokens: int = 4_000_000
    max_step_seconds: float | None = None


class Scheduler:
    """Owns the requests of one engine, from `add` to their last event. Not thread-safe: the loop calls it."""

    def __init__(self, cache: KVCacheManager, limits: SchedulerLimits, eos_token_ids: Iterable[int] = ()) -> None:
        self.cache = cache
        # What fits alone in all pages always fits in the end: nothing admitted can get stuck for ever.
        pool_tokens = cache.num_pages * cache.page_size
        self.limits = replace(limits, max_model_len=min(limits.max_model_len, pool_tokens))
        self._eos = frozenset(eos_token_ids)
        self._budget = PrefillBudget(limits.max_step_tokens, limits.max_step_seconds)
        self._requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(limits.max_waiting, limits.max_waiting_tokens)
        self._running: list[Request] = []  # in order of precedence
        self._ending: dict[str, FinishReason] = {}  # to end at the next border between steps, and why
        self._num_steps = self._num_preemptions = self._num_finished = 0
        self._num_deferred = 0  # prompts that the last step passed over: another one computes their beginning

    # --- what comes in -------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise NeverFits when no amount of waiting would help. Has no side effects."""
        longest = request.num_prompt + request.sampling.max_tokens
        if request.num_prompt == 0:
            raise NeverFits("the prompt is empty: at least one token is needed")
        if longest > self.limits.max_model_len:
            raise NeverFits(
                f"{request.num_prompt} prompt tokens + max_tokens {request.sampling.max_tokens} = {longest}, "
                f"but this engine holds at most {self.limits.max_model_len} per request"
            )

    def add(self, request: Request) -> None:
        """Put a request in the queue. Raises NeverFits, QueueFull, or ValueError when the id is in use."""
        self.check(request)
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        self.waiting.check_room(request)
        params = request.sampling
        request.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        request.longest = min(request.num_prompt + params.max_tokens, self.limits.max_model_len)
        self._requests[request.request_id] = request
        self._wait(request)
        if request.num_resumed and (reason := self._finish_reason(request, request.tokens[-1])):
            # Its engine was lost after the last token and before word of the end.
            self._ending[request.request_id] = reason

    def abort(self, request_id: str) -> None:
        """End a request at the next border between steps; unknown and finished ids are no error."""
        if request_id in self._requests:
            self._ending.setdefault(request_id, "abort")

    # --- a step out ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """The next step. Pages it needs are taken here; a plan without chunks means there is nothing to do."""
        ended = [self._end(self._requests[id_], reason, now) for id_, reason in list(self._ending.items())]
        step = _StepInMaking()
        self._num_deferred = 0
        self._place_decodes(step, now)
        room = self._budget.tokens(len(step.chunks))
        self._place_prompts(step, room, now)
        if self._running and not step.chunks:
            self._start_over(step, now)
        return StepPlan(tuple(step.chunks), tuple(step.copies), tuple(step.preempted), tuple(ended))

    def _place_decodes(self, step: _StepInMaking, now: float) -> None:
        for request in list(self._running):
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it
            if request.num_to_compute == 1:
                self._place(step, request, 1, now)
            else:
                step.prompts.append(request)

    def _place_prompts(self, step: _StepInMaking, room: int, now: float) -> None:
        """Share the prefill budget: the oldest prompt first, the shortest next, then who can use the rest."""
        running = (prompt for prompt in step.prompts if prompt.status is Status.RUNNING)
        prompts = [*running, *self.waiting.first(_WINDOW)]
        if not prompts or room <= 0:
            return
        oldest = min(prompts, key=precedence)
        others = sorted(
            (p for p in prompts if p is not oldest), key=lambda p: (-p.priority, p.num_to_compute, p.arrival)
        )
        guaranteed = max(1, room // _OLDEST_SHARE) if others else room
        has_memory = oldest.status is Status.RUNNING or self._admit(step, oldest, now)
        given = {oldest.request_id: 0}
        if oldest.status is Status.RUNNING:
            given[oldest.request_id] = min(guaranteed, oldest.num_to_compute)
        room -= given[oldest.request_id]
        for prompt in others:
            if room <= 0:
                break
            if prompt.status is Status.WAITING and has_memory:
                # Nobody overtakes an older request into the memory that it waits for.
                has_memory = self._admit(step, prompt, now)
            if prompt.status is Status.RUNNING:
                given[prompt.request_id] = min(room, prompt.num_to_compute)
                room -= given[prompt.request_id]
        if oldest.status is Status.RUNNING:
            given[oldest.request_id] += min(room, oldest.num_to_compute - given[oldest.request_id])
        for prompt in prompts:
            if given.get(prompt.request_id) and prompt.status is Status.RUNNING:
                self._place(step, prompt, given[prompt.request_id], now)

    def _place(self, step: _StepInMaking, request: Request, num_tokens: int, now: float) -> None:
        """Give `request` tokens in this step, making room for them; without room it sits this step out."""
        assert request.lease is not None
        tokens, start = request.tokens, request.num_computed
        end = start + num_tokens
        while True:
            try:
                copies = self.cache.extend(request.lease, end, now)
                break
            except OutOfPages:
                victim = self._victim(step, request)
                if victim is None:
                    return
                self._preempt(victim, now)
                step.preempted.append(victim)
        step.copies += copies
        ids, samples = tokens[start:end], end == len(tokens)
        step.chunks.append(Chunk(request, start, num_tokens, ids, request.lease.pages, samples))

    # --- memory --------------------------------------------------------------------------------------------

    def _admit(self, step: _StepInMaking, request: Request, now: float) -> bool:
        """Start a waiting request if its whole prompt fits beside what is running. Takes no page yet.

        Returns whether there was room, so that a younger request may be tried; the request's status says whether
        it was started: it also waits while a running prompt computes what it could share in the next step.
        """
        if step.preempted or len(self._running) >= self.limits.max_running:
            return False
        match = self.cache.match(request.namespace, request.tokens, now)
        if self._is_being_computed(request, match.length):
            self._num_deferred += 1
            return True
        lease = self.cache.lock(match, priority=request.priority)
        # Locking may have made evictable pages unavailable: what counts is the room left after it.
        room = self.cache.available - self._pages_promised()
        if self.cache.pages_needed(lease, request.num_tokens + 1) > room:
            self.cache.drop_partial(lease)  # its source page is unlocked: one page more to evict
            room = self.cache.available - self._pages_promised()
            if self.cache.pages_needed(lease, request.num_tokens + 1) > room:
                self.cache.finish(lease, [], now)
                return False
        self.waiting.remove(request)
        bisect.insort(self._running, request, key=precedence)
        self._start(request, lease.num_cached, now)
        request.lease = lease
        return True

    def _is_being_computed(self, request: Request, num_cached: int) -> bool:
        """Whether a running prompt is computing the page that `request` would begin with.

        A burst of prompts that begin alike then computes the common part once, not once each.
        """
        end = num_cached + self.cache.page_size
        page = request.tokens[num_cached:end]
        return request.num_tokens > end and any(
            other.num_computed < end < other.num_tokens
            and other.namespace == request.namespace
            and other.tokens[num_cached:end] == page
            and other.tokens[:num_cached] == request.tokens[:num_cached]
            for other in self._prompts_running()
        )

    def _start(self, request: Request, num_cached: int, now: float) -> None:
        """Book an admission. Hits count once, at the first; what preemption or migration repeats is kept apart."""
        is_repeat = request.num_cached is not None or request.num_resumed > 0
        self.cache.record_admission(request.num_tokens, num_cached, recompute=is_repeat)
        num_before = request.num_computed
        if request.num_cached is None:
            request.num_cached = min(num_cached, request.num_prompt)
            request.admitted_at = now
            if request.num_resumed:  # the engine it comes from had computed all but its last token
                num_before = request.num_tokens - 1
        request.num_recomputed += max(0, num_before - num_cached)
        request.num_computed = num_cached
        request.status = Status.RUNNING

    def _pages_promised(self) -> int:
        """Pages that the running requests still need for their prompts and next token."""
        return sum(
            self.cache.pages_needed(request.lease, request.num_tokens + 1)
            for request in self._running
            if request.lease is not None
        )

    def _victim(self, step: _StepInMaking, request: Request) -> Request | None:
        """The lowest-priority, newest running request after `request` that is not part of this step."""
        placed = {chunk.request.request_id for chunk in step.chunks}
        for candidate in reversed(self._running):
            if candidate is request:
                return None
            if candidate.request_id not in placed:
                return candidate
        return None

    def _preempt(self, request: Request, now: float) -> None:
        """Take a request's pages; what it computed stays in the tree while there is room."""
        self._release(request, now, keep=True)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._running.remove(request)
        self._wait(request)  # at its place, which it keeps

    def _wait(self, request: Request) -> None:
        request.num_expected = self.cache.peek(request.namespace, request.tokens)
        self.waiting.add(request)

    def _release(self, request: Request, now: float, keep: bool) -> None:
        """Give back the pages of a request, if it holds any; what is in them stays in the tree with `keep`."""
        if request.lease is None:
            return
        # Admitted but not placed yet: the page that its match ends in has not been copied.
        num_held = min(request.num_computed, len(request.lease.pages) * self.cache.page_size)
        self.cache.finish(request.lease, request.tokens[:num_held] if keep else [], now)
        request.lease = None

    def _start_over(self, step: _StepInMaking, now: float) -> None:
        """The only running request finds no page, though it fits alone: what pins the rest is how the tree divides
        its prefix. It starts over with an empty tree, so that it always ends.
        """
        for request in list(self._running):
            self._preempt(request, now)
            step.preempted.append(request)
        self.cache.reset()

    # --- a result in ---------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, now: float, seconds: float = 0.0) -> list[Event]:
        """Take in a step's result, which took `seconds`; the events it caused, aborts included."""
        events = list(plan.ended)
        sampled = zip(result.token_ids, result.logprobs, strict=True)
        for chunk in plan.chunks:
            token, logprobs = next(sampled) if chunk.samples else (None, None)
            if chunk.request.status is not Status.RUNNING:
                continue  # it ended while the step ran
            self._computed(chunk, now)
            if token is not None:
                events.append(self._generated(chunk.request, token, logprobs, now))
        self._budget.observe(plan.num_decodes, plan.num_tokens - plan.num_decodes, seconds)
        self._num_steps += 1
        return events

    def fail(self, plan: StepPlan, message: str, now: float) -> list[Event]:
        """End all requests of a step that could not be run. Their pages' content is unknown: none is kept."""
        return [
            *plan.ended,
            *(self._end(chunk.request, "error", now, keep=False, error=message) for chunk in plan.chunks),
        ]

    def _computed(self, chunk: Chunk, now: float) -> None:
        request = chunk.request
        request.num_computed = end = chunk.start + chunk.num_tokens
        assert request.lease is not None
        if request.lease.source is not None:
            self.cache.release_copy(request.lease)
        if chunk.num_tokens > 1 or end <= request.num_prompt:  # a decode's tokens enter the tree at its end
            self.cache.insert(request.lease, request.tokens[:end], now)

    def _generated(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> Event:
        if token < 0:
            return self._end(request, "error", now, keep=False, error="the model computed no valid probabilities")
        request.tokens.append(token)
        if request.first_token_at is None:
            request.first_token_at = now
        reason = self._finish_reason(request, token)
        reported = () if logprobs is None else (logprobs,)
        if reason is not None:
            return self._end(request, reason, now, tokens=(token,), logprobs=reported)
        timings = None
        if request.num_told != request.num_preemptions:
            request.num_told, timings = request.num_preemptions, _timings(request, now)
        return Event(request.request_id, (token,), reported, None, request.num_cached or 0, None, timings)

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_ids and request.num_output > request.sampling.min_tokens:
            return "stop"
        return "length" if len(request.tokens) >= request.longest else None

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        keep: bool = True,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str | None = None,
    ) -> Event:
        """Release all that a request holds. With `keep`, what it computed stays in the tree."""
        self._release(request, now, keep)
        if request.status is Status.RUNNING:
            self._running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self._requests[request.request_id]
        self._ending.pop(request.request_id, None)
        self._num_finished += 1
        return Event(
            request.request_id,
            tokens,
            logprobs,
            reason,
            request.num_cached or 0,
            error,
            _timings(request, now),
        )

    # --- what it says of itself ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a call of `schedule` would do anything."""
        return bool(self._requests)

    def account(self) -> PageAccount:
        """Where the pages are; they sum to `cache.num_pages`, always."""
        return self.cache.account()

    def load(self, now: float) -> EngineLoad:
        """A snapshot of how busy this engine is. O(requests)."""
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self.waiting),
            num_deferred=min(self._num_deferred, len(self.waiting)),
            waiting_prefill_tokens=self.waiting.num_uncached
            + sum(request.num_to_compute for request in self._prompts_running()),
            oldest_wait_seconds=max((now - request.arrival for request in self.waiting), default=0.0),
            pages=self.account(),
            page_size=self.cache.page_size,
            eviction_age=self.cache.eviction_age(now),
            cache=copy.copy(self.cache.stats),
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_finished=self._num_finished,
            prefill_rate=self._budget.prefill_rate,
            decode_seconds=self._budget.decode_seconds,
        )

    def forget_totals(self) -> None:
        """Let what counts up begin at 0 again; measured rates stay."""
        self._num_steps = self._num_preemptions = self._num_finished = 0
        self.cache.stats = CacheStats()
        self.cache.page_ages.drain()

    def _prompts_running(self) -> Iterator[Request]:
        return (request for request in self._running if request.num_to_compute > 1)


class _StepInMaking:
    """The parts of a plan while it is put together."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.copies: list[PageCopy] = []
        self.prompts: list[Request] = []  # running ones with more than one token to compute
        self.preempted: list[Request] = []


def _timings(request: Request, now: float) -> Timings | None:
    if request.admitted_at is None:
        return None
    first = now if request.first_token_at is None else request.first_token_at
    return Timings(
        queue=request.admitted_at - request.arrival,
        prefill=first - request.admitted_at,
        decode=now - first,
        num_preemptions=request.num_preemptions,
        num_recomputed=request.num_recomputed,
    )
