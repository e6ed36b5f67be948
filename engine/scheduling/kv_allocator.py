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

from cache import KVCacheManager, Lease, OutOfPages
from engine.request import Request, Status
from engine.scheduling import beam_group
from engine.scheduling.prefill_budget import PrefillBudget
from engine.scheduling.step_builder import StepBuilder
from engine.scheduling.swap import SwapSpace
from engine.scheduling.waiting_queue import WaitingQueue, precedence

# Tokens that a request must have room to grow by when it comes back, and all who run with it: twice this after the
# first preemption.
_GROWTH = 8


class KVAllocator:
    """The requests that hold pages, and those that wait for some."""

    def __init__(
        self,
        cache: KVCacheManager,
        waiting: WaitingQueue,
        max_running: int,
        swap: SwapSpace,
        budget: PrefillBudget,
    ) -> None:
        self.cache = cache
        self.swap = swap
        self.waiting = waiting
        self.running: list[Request] = []
        """In order of precedence."""
        self.is_in_flight = False
        """Whether a step is, so that nobody can be preempted."""
        self.is_starved = False
        """Whether somebody could not grow because of that: the step in flight has to end first."""
        self.refused: Request | None = None
        """Who found no room in the last step."""
        self.is_swapping = False
        """Whether the last step copies to the host: nothing is read from there before that is known to be done."""
        self.num_preemptions = 0
        self.num_swapped = 0
        """Preemptions with a copy to the host."""
        self.num_deferred = 0
        """Prompts that the last step passed over: another one computes their beginning."""
        self._max_running = max_running
        self._budget = budget

    def begin_step(self, *, is_in_flight: bool) -> None:
        """A new step is planned."""
        self.is_in_flight, self.is_starved, self.is_swapping = is_in_flight, False, False
        self.num_deferred = 0
        self.swap.begin_step()

    def enqueue(self, request: Request) -> None:
        """Put a request in the queue, at its place."""
        num_found = self.cache.peek(request.namespace, request.reusable)
        request.num_expected_cached = self.swap.reach(request.request_id, num_found)
        self.waiting.add(request)

    # --- more ----------------------------------------------------------------------------------------------

    def admit(self, step: StepBuilder, request: Request, now: float) -> bool:
        """Start a waiting request if its whole prompt fits beside what is running. Takes no page yet.

        Returns whether there was room, so that a younger request may be tried; the request's status says whether
        it was started: it also waits while a running prompt computes what it could share in the next step.
        """
        if step.preempted:
            return False
        has_room = self._start_if_it_fits(step, request, now)
        if not has_room:
            self.refused = request
        return has_room

    def preempt_for_refused(self, step: StepBuilder, now: float) -> None:
        """Let who was refused have the place of running requests that it may push out, if theirs is enough."""
        request, self.refused = self.refused, None
        if request is None or request.status is not Status.WAITING:
            return
        victims = [other for other in self.running if request.queue_position.can_preempt(other.queue_position)]
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
        if not self._has_rows(request, others):
            return False
        growth = _growth(request)
        room = self.cache.available - self._pages_promised(others, growth)
        room += sum(len(lease.pages) for victim in victims for lease in beam_group.leases(victim))
        num_missing = (
            (request.width - 1) * growth
            + _length_after(request, growth)
            - self.cache.peek(request.namespace, request.reusable)
        )
        return num_missing <= room * self.cache.page_size

    def _has_rows(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a batch has places for it beside these."""
        return sum([other.width for other in running]) + request.width <= self._max_running

    def _start_if_it_fits(self, step: StepBuilder, request: Request, now: float) -> bool:
        if not self._has_rows(request, self.running):
            return False
        match = self.cache.match(request.namespace, request.reusable, now)
        num_reached = self.swap.reach(request.request_id, match.length)
        if self._is_being_computed(step, request, num_reached):
            self.num_deferred += 1
            return True
        lease = self.cache.lock(match, priority=request.priority)
        # The host has the page that the match ends in. And without room a copy may be what is too much.
        if num_reached > match.length or not self._fits(request, lease):
            self.cache.drop_partial(lease)
        if not self._fits(request, lease):
            if self.running:
                self.cache.finish(lease, [], now)
                return False
            self.cache.reset()  # It fits alone, but for pages that others went on in.
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=precedence)
        self._start(request, lease.num_cached, now)
        request.lease = lease
        return True

    def _fits(self, request: Request, lease: Lease) -> bool:
        """Whether there is room for a request beside what is running, for a while at least.

        Locking the lease may have made evictable pages unavailable: what counts is the room left after it.
        """
        growth = _growth(request)
        needed = self._pages_after(request, lease, growth)
        return needed + self._pages_promised(self.running, growth) <= self.cache.available

    def has_spare(self, lease: Lease, num_tokens: int) -> bool:
        """Whether a running request could cover `num_tokens` tokens with pages that nobody else counts on."""
        needed = self.cache.pages_needed(lease, num_tokens)
        return not needed or needed <= self.cache.available - self._pages_promised(self.running, 1)

    def grow(self, step: StepBuilder, request: Request, num_tokens: int, now: float) -> bool:
        """Make a running request's pages cover `num_tokens` tokens; False when it has to sit this step out."""
        lease = request.lease
        assert lease is not None
        begins = not lease.is_admitted
        while True:
            try:
                step.copies += self.cache.extend(lease, num_tokens, now)
                break
            except OutOfPages:
                if self._make_room(step, request, now):
                    continue
                if self.is_in_flight or self.running != [request] or not self.cache.reset():
                    return False
        if begins:
            step.swap_in += self.swap.swap_in(request.request_id, lease.pages, lease.num_cached)
        return True

    def grow_beams(self, step: StepBuilder, request: Request, now: float) -> bool:
        """Make the pages of every beam cover its tokens, or of none; False when all have to sit this step out."""
        while sum([self._pages_after(beam, beam.lease, 0) for beam in request.beams]) > self.cache.available:
            # All that can be evicted is too little, but without it the tree may need fewer pages for the rest.
            if not self.cache.evict(self.cache.num_pages, now) and not self._make_room(step, request, now):
                if self.running == [request] and not self.is_in_flight:
                    self._start_over(step, request, now)
                return False
        for beam in request.beams:
            assert beam.lease is not None
            step.copies += self.cache.extend(beam.lease, beam.num_tokens, now)
        return True

    def _start_over(self, step: StepBuilder, request: Request, now: float) -> None:
        """A search that is alone and lacks pages copies some that others left. Without these it has enough."""
        self._preempt(step, request, now)
        self.cache.reset()

    def _make_room(self, step: StepBuilder, request: Request, now: float) -> bool:
        """Preempt somebody for a running request, if there is who may be."""
        if self.is_in_flight:
            self.is_starved = True
            return False
        victim = self._victim(step, request)
        if victim is not None:
            self._preempt(step, victim, now)
        return victim is not None

    def _is_being_computed(self, step: StepBuilder, request: Request, num_cached: int) -> bool:
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
            if other.is_prefilling
        )

    def _start(self, request: Request, num_cached: int, now: float) -> None:
        """Book an admission. Hits count once, at the first; what preemption or migration repeats is kept apart."""
        is_repeat = request.num_cached is not None or request.num_resumed > 0
        num_reached = self.swap.reach(request.request_id, num_cached)
        self.cache.record_admission(
            request.num_tokens, num_cached, recompute=is_repeat, host_tokens=num_reached - num_cached
        )
        num_before = request.num_computed
        if request.num_cached is None:
            request.num_cached = min(num_cached, request.num_prompt)
            request.admitted_at = now
            if request.num_resumed:  # the engine it comes from had computed all but its last token
                num_before = request.num_tokens - 1
        request.num_recomputed += max(0, num_before - num_reached)
        request.num_computed = request.num_planned = num_reached
        request.status = Status.RUNNING

    def _pages_promised(self, running: Sequence[Request], growth: int) -> int:
        """Pages that running requests still need for the tokens they have and `growth` more each."""
        return sum(
            self._pages_after(part, part.lease, growth)
            for request in running
            for part in request.beams or (request,)
        )

    def _pages_after(self, request: Request, lease: Lease | None, growth: int) -> int:
        """Pages that a request needs for its tokens and `growth` more; after a search's prompt, each beam does."""
        if lease is None:
            return 0
        length = _length_after(request, growth)
        needed = self.cache.pages_needed(lease, length)
        if request.search is not None and request.leader is None:
            size = self.cache.page_size
            needed += (request.width - 1) * (-(-length // size) - request.num_tokens // size)
        return needed

    # --- less ----------------------------------------------------------------------------------------------

    def release(self, request: Request, now: float, *, keep: bool) -> None:
        """Take a request out of the queue or the batch, with all that it holds; with `keep`, what it computed
        stays in the tree.

        Its pages may still be written by a step in flight. Whoever gets them next writes in a later step.
        """
        self._release_pages(request, now, keep)
        self.swap.forget(request.request_id)
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _victim(self, step: StepBuilder, request: Request) -> Request | None:
        """The lowest-priority, newest running request after `request` that is not part of this step."""
        placed = {(chunk.request.leader or chunk.request).request_id for chunk in step.chunks}
        for candidate in reversed(self.running):
            if candidate is request:
                return None
            if candidate.request_id not in placed:
                return candidate
        return None

    def _preempt(self, step: StepBuilder, request: Request, now: float) -> None:
        """Take a request's pages; what it computed stays in the tree while there is room, and goes to the host if
        that pays.
        """
        if request.lease is not None:
            start, end = self.cache.shared_tokens(request.lease), len(self._held_tokens(request))
            rate = self._budget.prefill_rate
            copies = self.swap.swap_out(request.request_id, request.lease.pages, start, end, rate)
            step.swap_out += copies
            self.is_swapping |= bool(copies)
            self.num_swapped += bool(copies)
        self._release_pages(request, now, keep=True)
        if request.search is not None:
            beam_group.begin(request)  # again, after its prompt
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(request)
        step.preempted.append(request)
        self.enqueue(request)  # at its place, which it keeps

    def _release_pages(self, request: Request, now: float, keep: bool) -> None:
        beam_group.end(self.cache, request, now)
        if request.lease is None:
            return
        self.cache.finish(request.lease, self._held_tokens(request) if keep else [], now)
        request.lease = None

    def _held_tokens(self, request: Request) -> Sequence[int]:
        """The tokens whose KV its pages hold."""
        assert request.lease is not None
        # Admitted but not placed yet: the page that its match ends in has not been copied.
        return request.tokens[: min(request.num_computed, len(request.lease.pages) * self.cache.page_size)]


def _growth(request: Request) -> int:
    """Tokens for which there must be room when it is admitted: more after a preemption, twice as many each time.

    So it is preempted about as often as its tokens can be doubled, not every few tokens.
    """
    return _GROWTH << request.num_preemptions if request.num_preemptions else 1


def _length_after(request: Request, growth: int) -> int:
    return min(request.num_tokens + growth, max(request.longest, request.num_tokens))
