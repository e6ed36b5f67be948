"""Who holds KV pages: admission, growth, preemption, release. Everything that takes pages or gives them back.

    waiting ── admit: its prompt fits ──▶ running ── grow, page by page ──▶ release
       ▲                                     │
       └──────────── preempt ────────────────┘   when one before it cannot grow, or, of a higher priority, not
                                                 start: the last in order first

Pages are taken from running requests only while no step is in flight: what it writes must go somewhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from cache import KVCacheManager, OutOfPages
from engine.request import Request, Status
from engine.step import StepInMaking
from engine.waiting_queue import WaitingQueue, precedence


class Memory:
    """The requests that hold pages, and those that wait for some."""

    def __init__(self, cache: KVCacheManager, waiting: WaitingQueue, max_running: int) -> None:
        self.cache = cache
        self.waiting = waiting
        self.running: list[Request] = []
        """In order of precedence."""
        self.is_in_flight = False
        """Whether a step is, so that nobody can be preempted."""
        self.is_starved = False
        """Whether somebody could not grow because of that: the step in flight has to end first."""
        self.refused: Request | None = None
        """Who found no room in the last step."""
        self.num_preemptions = 0
        self.num_deferred = 0
        """Prompts that the last step passed over: another one computes their beginning."""
        self._max_running = max_running

    def wait(self, request: Request) -> None:
        """Put a request in the queue, at its place."""
        request.num_expected = self.cache.peek(request.namespace, request.reusable)
        self.waiting.add(request)

    # --- more ----------------------------------------------------------------------------------------------

    def admit(self, step: StepInMaking, request: Request, now: float) -> bool:
        """Start a waiting request if its whole prompt fits beside what is running. Takes no page yet.

        Returns whether there was room, so that a younger request may be tried; the request's status says whether
        it was started: it also waits while a running prompt computes what it could share in the next step.
        """
        if step.preempted:
            return False
        has_room = len(self.running) < self._max_running and self._start_if_it_fits(step, request, now)
        if not has_room:
            self.refused = request
        return has_room

    def make_way(self, step: StepInMaking, now: float) -> None:
        """Let who was refused have the place of running requests that it may push out, if theirs is enough."""
        request, self.refused = self.refused, None
        if request is None or request.status is not Status.WAITING:
            return
        victims = [other for other in self.running if request.place.may_push_out(other.place)]
        if not victims or not self._would_fit(request, victims):
            return
        if self.is_in_flight:
            self.is_starved, self.refused = True, request
            return
        while victims:
            self._preempt(step, victims.pop(), now)
            if self._start_if_it_fits(step, request, now):
                return

    def _would_fit(self, request: Request, victims: Sequence[Request]) -> bool:
        """Whether there would be room for it without these; more than there would be when they share pages."""
        others = [other for other in self.running if other not in victims]
        room = self.cache.available - self._pages_promised(others)
        room += sum(len(victim.lease.pages) for victim in victims if victim.lease is not None)
        num_missing = request.num_tokens + 1 - self.cache.peek(request.namespace, request.tokens)
        return num_missing <= room * self.cache.page_size

    def _start_if_it_fits(self, step: StepInMaking, request: Request, now: float) -> bool:
        match = self.cache.match(request.namespace, request.reusable, now)
        if self._is_being_computed(step, request, match.length):
            self.num_deferred += 1
            return True
        lease = self.cache.lock(match, priority=request.priority)
        # Locking may have made evictable pages unavailable: what counts is the room left after it.
        room = self.cache.available - self._pages_promised(self.running)
        if self.cache.pages_needed(lease, request.num_tokens + 1) > room:
            self.cache.drop_partial(lease)  # its source page is unlocked: one page more to evict
            room = self.cache.available - self._pages_promised(self.running)
            if self.cache.pages_needed(lease, request.num_tokens + 1) > room:
                self.cache.finish(lease, [], now)
                return False
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=precedence)
        self._start(request, lease.num_cached, now)
        request.lease = lease
        return True

    def grow(self, step: StepInMaking, request: Request, num_tokens: int, now: float) -> bool:
        """Make a running request's pages cover `num_tokens` tokens; False when it has to sit this step out."""
        assert request.lease is not None
        while True:
            try:
                step.copies += self.cache.extend(request.lease, num_tokens, now)
                return True
            except OutOfPages:
                if self.is_in_flight:
                    self.is_starved = True
                    return False
                victim = self._victim(step, request)
                if victim is None:
                    return False
                self._preempt(step, victim, now)

    def _is_being_computed(self, step: StepInMaking, request: Request, num_cached: int) -> bool:
        """Whether a running prompt is computing the page that `request` would begin with.

        A burst of prompts that begin alike then computes the common part once, not once each.
        """
        end = num_cached + self.cache.page_size
        tokens = request.reusable
        page = tokens[num_cached:end]
        return len(tokens) > end and any(
            other.num_computed < end < other.num_tokens
            and other.namespace == request.namespace
            and other.tokens[num_cached:end] == page
            and other.tokens[:num_cached] == tokens[:num_cached]
            for other in self.running
            if other.is_filling
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
        request.num_computed = request.num_planned = num_cached
        request.status = Status.RUNNING

    def _pages_promised(self, running: Sequence[Request]) -> int:
        """Pages that running requests still need for their prompts and next token."""
        return sum(
            self.cache.pages_needed(request.lease, request.num_tokens + 1)
            for request in running
            if request.lease is not None
        )

    # --- less ----------------------------------------------------------------------------------------------

    def release(self, request: Request, now: float, *, keep: bool) -> None:
        """Take a request out of the queue or the batch, with all that it holds; with `keep`, what it computed
        stays in the tree.

        Its pages may still be written by a step in flight. Whoever gets them next writes in a later step.
        """
        self._give_back(request, now, keep)
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def start_over(self, step: StepInMaking, now: float) -> None:
        """The only running request finds no page, though it fits alone: what pins the rest is how the tree divides
        its prefix. It starts over with an empty tree, so that it always ends.
        """
        for request in list(self.running):
            self._preempt(step, request, now)
        self.cache.reset()

    def _victim(self, step: StepInMaking, request: Request) -> Request | None:
        """The lowest-priority, newest running request after `request` that is not part of this step."""
        placed = {chunk.request.request_id for chunk in step.chunks}
        for candidate in reversed(self.running):
            if candidate is request:
                return None
            if candidate.request_id not in placed:
                return candidate
        return None

    def _preempt(self, step: StepInMaking, request: Request, now: float) -> None:
        """Take a request's pages; what it computed stays in the tree while there is room."""
        self._give_back(request, now, keep=True)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(request)
        step.preempted.append(request)
        self.wait(request)  # at its place, which it keeps

    def _give_back(self, request: Request, now: float, keep: bool) -> None:
        if request.lease is None:
            return
        self.cache.finish(request.lease, self._held_tokens(request) if keep else [], now)
        request.lease = None

    def _held_tokens(self, request: Request) -> Sequence[int]:
        """The tokens whose KV its pages hold."""
        assert request.lease is not None
        # Admitted but not placed yet: the page that its match ends in has not been copied.
        return request.tokens[: min(request.num_computed, len(request.lease.pages) * self.cache.page_size)]
