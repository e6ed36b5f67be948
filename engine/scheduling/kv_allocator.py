"""Allocates KV pages to requests: admission, growth, preemption and release.

    waiting ── admit: the prompt fits ──▶ running ── grow, page by page ──▶ release
       ▲                                     │
       └──────────── preempt ────────────────┘   the last in order first, when a request before it cannot grow,
                                                 or a more urgent one cannot start

Pages are taken from running requests only while no step is in flight, because a step in flight writes to them.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence

from cache import CachedPrefix, KVCacheManager, Lease, Match, OutOfPages
from engine.host_tier.host_kv import HostKV
from engine.scheduling.extensions import beam_group, recurrent
from engine.scheduling.prefill_budget import PrefillBudget
from engine.scheduling.step_builder import StepBuilder
from engine.scheduling.waiting_queue import WaitingQueue, precedence
from engine.tenants.tenant_shares import to_give_way
from engine.values.request import Request, Status

# A preempted request is admitted again when it and all running ones have room to grow by some tokens: twice this
# number after the first preemption.
_GROWTH = 8
# A tenant that shares the engine leaves one of this many rows, and one of this many pages, free for the others.
_LEFT_TO_OTHERS = 16


class AdmissionOutcome(enum.Enum):
    """The result of an attempt to start a waiting request."""

    STARTED = "started"
    DEFERRED = "deferred"
    """It waits a step because a running prompt computes its first page, or because its pages are being copied to
    host memory."""
    NO_MEMORY = "no memory"
    """Its prompt does not fit with the running requests."""


class KVAllocator:
    """Allocates and frees the KV pages of requests. Owns the running requests and admits the waiting ones."""

    def __init__(
        self,
        cache: KVCacheManager,
        waiting: WaitingQueue,
        max_running: int,
        host: HostKV,
        budget: PrefillBudget,
    ) -> None:
        self.cache = cache
        self.host = host
        self.waiting = waiting
        self.running: list[Request] = []
        """In order of precedence."""
        self.is_in_flight = False
        """Whether a step is in flight, so that no request can be preempted."""
        self.is_starved = False
        """Whether a request could not grow or start because a step is in flight, which has to end first."""
        self.denied: Request | None = None
        """The request that did not fit in the last step."""
        self.is_swapping = False
        """Whether the last step copies to the host; nothing may be read from there before that step ends."""
        self.num_preemptions = 0
        self.num_swapped = 0
        """Preemptions that copied KV to the host."""
        self.num_deferred = 0
        """Prompts that the last step deferred because another one computes their beginning."""
        self._max_running = max_running
        self._budget = budget
        self._num_rows = 0  # that all running requests use together
        self._leaves_room: str | None = None
        self._promised: dict[int, int] = {}  # growth -> pages promised to running requests, where known

    def begin_step(self, *, is_in_flight: bool, leaves_room: str | None = None) -> None:
        """Begin to plan a step. Requests of the tenant `leaves_room` leave its last rows and pages free, so that
        other tenants need not preempt them.
        """
        self._leaves_room = leaves_room
        self.is_in_flight, self.is_starved, self.is_swapping = is_in_flight, False, False
        self.num_deferred = 0
        self.forget_promises()
        self.host.begin_step()

    def welcome(self, request: Request, now: float) -> None:
        """Put a new request in the queue, between two steps, and begin to load its pages from a lower tier."""
        prefix = self.cache.find(request.namespace, request.looked_up)
        self.host.fetch(request, prefix.num_reusable, self._budget.prefill_rate, now)
        self._enqueue(request, prefix)

    def _enqueue(self, request: Request, prefix: CachedPrefix) -> None:
        """Put a request at its position in the queue; the tree has `prefix` of it."""
        num_reached = self.host.reach(request, prefix, self._budget.prefill_rate)
        request.num_expected_cached = max(num_reached, self.host.num_coming(request.request_id))
        self.waiting.add(request)

    # --- pages are taken -----------------------------------------------------------------------------------

    def admit(self, step: StepBuilder, request: Request, now: float) -> AdmissionOutcome:
        """Start a waiting request if its whole prompt fits with the running requests. Takes no page yet.

        After NO_MEMORY try no other request in this step, because none may overtake this one into the memory that
        it waits for.
        """
        if step.preempted:
            return AdmissionOutcome.NO_MEMORY
        outcome = self._start_if_it_fits(step, request, now)
        if outcome is AdmissionOutcome.NO_MEMORY:
            self.denied = request
        return outcome

    def preempt_for_waiting(self, step: StepBuilder, now: float, *, is_shared: bool) -> None:
        """Preempt less urgent requests, and those of tenants above their shares, if waiting requests then fit."""
        while (request := self._to_start()) is not None:
            victims = [other for other in self.running if request.queue_position.can_preempt(other.queue_position)]
            if not self._preempt_for(step, request, victims, now):
                break
        while is_shared and not self.is_starved and len(self.waiting):
            exchange = to_give_way(self.running, self.waiting)
            if exchange is None:
                break
            request, victims = exchange
            if self._would_fit(request, ()):  # It need not wait behind larger ones of that tenant.
                started = self._start_if_it_fits(step, request, now) is AdmissionOutcome.STARTED
            else:
                started = self._preempt_for(step, request, victims, now)
            if not started:
                break

    def _to_start(self) -> Request | None:
        """Return the waiting request for which others may be preempted: the one that did not fit, or an urgent one
        that would not fit because deferrable ones run.
        """
        denied, self.denied = self.denied, None
        if denied is not None and denied.status is not Status.WAITING:
            denied = None
        if (denied is None or denied.is_deferrable) and self.running and self.running[-1].is_deferrable:
            urgent = self.waiting.first_urgent()
            if urgent is not None and not self._would_fit(urgent, ()):
                return urgent
        return denied

    def _preempt_for(self, step: StepBuilder, request: Request, victims: list[Request], now: float) -> bool:
        """Preempt `victims`, the last first, until `request` fits, and start it; False if it cannot start yet."""
        if not victims or not self._would_fit(request, victims):
            return False
        if self.is_in_flight:
            self.is_starved, self.denied = True, request
            return False
        while victims:
            self._preempt(step, victims.pop(), now)
            outcome = self._start_if_it_fits(step, request, now)
            if outcome is not AdmissionOutcome.NO_MEMORY:
                return outcome is AdmissionOutcome.STARTED
        return False

    def _would_fit(self, request: Request, victims: Sequence[Request]) -> bool:
        """Whether `request` would fit without `victims`; overestimates the room if they share pages."""
        others = [other for other in self.running if other not in victims]
        if not self._has_rows(request, sum([other.width for other in others])):
            return False
        growth = _growth(request)
        room = self.cache.available - sum([self._pages_after_all(other, growth) for other in others])
        room += sum(lease.num_pages for victim in victims for lease in beam_group.leases(victim))
        length, num_found = _length_after(request, growth), self.cache.peek(request.namespace, request.looked_up)
        in_rows = self.cache.pages_for(length) - -(-length // self.cache.page_size)
        num_missing = (request.width - 1) * growth + length - num_found
        return num_missing <= (room - in_rows) * self.cache.page_size

    def _has_rows(self, request: Request, num_taken: int) -> bool:
        """Whether a batch in which `num_taken` rows are taken has rows for `request`."""
        num_left = self._max_running // _LEFT_TO_OTHERS if num_taken and self._leaves_room == request.tenant else 0
        return num_taken + request.width <= self._max_running - num_left

    def _start_if_it_fits(self, step: StepBuilder, request: Request, now: float) -> AdmissionOutcome:
        """Admit a waiting request if there is room for it.

        1. Its rows must fit into the batch.
        2. Match its tokens: how many the tree has, and how many more host memory has.
        3. Defer it while another request computes its first page, or a transfer brings it.
        4. Lock the match. Only then count the room: the lock may have made evictable pages unavailable.
        5. Without room, give up the part of the match that needs a page to be copied to, and count again.
        6. If there is still no room, undo all this, unless nothing else runs: then evict all that is not locked.
        7. Start it: it leaves the queue, and the copy of its KV from host memory to the device begins.
        """
        if not self._has_rows(request, self._num_rows):
            return AdmissionOutcome.NO_MEMORY
        match = self.cache.match(request.namespace, request.looked_up, now)
        prefix = CachedPrefix(match.length, match.num_held)
        num_reached = self.host.reach(request, prefix, self._budget.prefill_rate)
        if self.host.is_awaited(request.request_id, now) or self._is_being_computed(request, num_reached):
            self.num_deferred += 1
            return AdmissionOutcome.DEFERRED
        if num_reached > prefix.num_reusable and self.cache.resume_points is not None:
            # Host memory has the state to resume from, so pages are of use up to it. Hold it before locking: the
            # lease may take the slot of another state, and that state may take pages of the host.
            self.host.hold(request, prefix, num_reached)
            match = self.cache.match_bare(request.namespace, request.looked_up, num_reached, now)
        lease = self.cache.lock(match, priority=request.priority)
        has_room = self._has_room(request, lease)
        # If the host has the page in which the match ends, no copy of it is needed; a copy may also not fit.
        if num_reached > match.length or not has_room:
            lease = self._without_copy(lease, match, num_reached, request.priority, now)
            has_room = self._has_room(request, lease)
        if not has_room:
            if self.running:
                self.cache.finish(lease, [], now)
                self.host.release(request.request_id)
                return AdmissionOutcome.NO_MEMORY
            self.cache.reset()  # Only pages that other requests extended prevent it from fitting.
        self.waiting.remove(request)
        self._start(request, lease, min(prefix.num_reusable, lease.num_cached), now)
        request.lease = lease
        if lease.state is not None:
            is_of_prefix = self.host.is_of_prefix(request.request_id)
            recurrent.begin(request, match.num_held, self.cache.page_size, keeps_start=is_of_prefix)
        self._enter(request)
        return AdmissionOutcome.STARTED

    def _without_copy(self, lease: Lease, match: Match, num_reached: int, priority: int, now: float) -> Lease:
        """Return a lease without the tokens whose page would have to be copied.

        Models with resume points can resume only at the end of the match. They would lose the whole match, so they
        give it up only where nothing else runs, or where host memory has a later resume point.
        """
        if self.cache.resume_points is None or num_reached > match.length:
            self.cache.drop_partial(lease)
        elif not self.running and match.length:
            self.cache.finish(lease, [], now)
            return self.cache.lock(Match(match.namespace, 0), priority=priority)
        return lease

    def _has_room(self, request: Request, lease: Lease) -> bool:
        """Whether a request fits with the running ones, with some room for all of them to grow.

        Call it after locking the lease, which may have made evictable pages unavailable.
        """
        if self.cache.snapshots is not None and lease.state is None:
            return False
        growth = _growth(request)
        needed = self._pages_after(request, lease, growth)
        if self._leaves_room == request.tenant:
            needed += self.cache.num_pages // _LEFT_TO_OTHERS
        return needed + self.pages_promised(growth) <= self.cache.available

    def has_spare(self, lease: Lease, num_tokens: int) -> bool:
        """Whether a running request can cover `num_tokens` tokens with pages promised to no other one."""
        needed = self.cache.pages_needed(lease, num_tokens)
        return not needed or needed <= self.cache.available - self.pages_promised(1)

    def grow(
        self, step: StepBuilder, request: Request, num_tokens: int, chunk: tuple[int, int], now: float
    ) -> bool:
        """Make a running request's pages cover `num_tokens` tokens, and those of layers with a window the next
        chunk (start, end); False when it has to skip this step.
        """
        lease = request.lease
        assert lease is not None
        begins = not lease.is_admitted
        self.forget_promises()
        while True:
            try:
                step.copies += self.cache.extend(lease, num_tokens, now, chunk)
                break
            except OutOfPages:
                if self._make_room(step, request, now):
                    continue
                if self.is_in_flight or self.running != [request] or not self.cache.reset():
                    return False
        if begins:
            step.from_host.add(self.host.load(request.request_id, lease))
        return True

    def grow_beams(self, step: StepBuilder, request: Request, now: float) -> bool:
        """Make the pages of all beams cover their tokens, or of none; False when all have to skip this step."""
        while sum([self._pages_after(beam, beam.lease, 0) for beam in request.beams]) > self.cache.available:
            # Evicting everything frees too little, but the search may need fewer pages afterwards.
            if not self.cache.evict(self.cache.num_pages, now) and not self._make_room(step, request, now):
                if self.running == [request] and not self.is_in_flight and not self.cache.account().lent:
                    self._start_over(step, request, now)
                return False
        self.forget_promises()
        for beam in request.beams:
            assert beam.lease is not None
            step.copies += self.cache.extend(beam.lease, beam.num_tokens, now)
        pages = {page for lease in beam_group.leases(request) for page in lease.pages}
        request.kv_pages_peak = max(request.kv_pages_peak, len(pages))
        return True

    def _start_over(self, step: StepBuilder, request: Request, now: float) -> None:
        """Restart the only running search, which lacks pages: it has enough when the tree keeps no pages."""
        self._preempt(step, request, now)
        self.cache.reset()

    def _make_room(self, step: StepBuilder, request: Request, now: float) -> bool:
        """Preempt a request for a running one; False when none may be preempted now."""
        if self.is_in_flight:
            self.is_starved = True
            return False
        victim = self._victim(step, request)
        if victim is not None:
            self._preempt(step, victim, now)
        return victim is not None

    def _is_being_computed(self, request: Request, num_cached: int) -> bool:
        """Whether a running prompt is computing the first page that `request` would compute.

        Deferring `request` lets a burst of prompts that begin alike compute the common part once.
        """
        if not self.cache.finds_prefixes:
            return False
        if self.cache.resume_points is not None:
            return recurrent.is_awaited(request, num_cached, self.running, self.cache.page_size)
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

    def _start(self, request: Request, lease: Lease, num_found: int, now: float) -> None:
        """Record an admission with `num_found` cached tokens, without those of host memory. Only the first
        admission counts cache hits; later ones count recomputation.
        """
        is_repeat, num_cached = request.num_cached is not None or request.num_resumed > 0, lease.num_cached
        num_reached = self.host.start(request, CachedPrefix(num_found, num_cached), self._budget.prefill_rate)
        assert num_reached >= num_cached, "pages were locked that lead to nothing"
        if lease.state is not None and num_reached > num_found:
            lease.state.await_at(num_reached)
        self.cache.record_admission(
            request.num_tokens, num_cached, recompute=is_repeat, host_tokens=num_reached - num_cached
        )
        num_before = request.num_computed
        if request.num_cached is None:
            request.num_cached = min(num_reached, request.num_prompt)
            request.admitted_at = now
            if request.num_resumed:  # the previous engine had computed all but its last token
                num_before = request.num_tokens - 1
        request.num_recomputed += max(0, num_before - num_reached)
        request.num_computed = request.num_planned = num_reached
        request.status = Status.RUNNING

    def _enter(self, request: Request) -> None:
        """Add a request to the running ones."""
        bisect.insort(self.running, request, key=precedence)
        self._num_rows += request.width
        for growth in self._promised:
            self._promised[growth] += self._pages_after_all(request, growth)

    def _leave(self, request: Request) -> None:
        """Take a request out of the running ones."""
        self.running.remove(request)
        self._num_rows -= request.width
        self.forget_promises()

    def forget_promises(self) -> None:
        """Note that running requests need other pages than before, because one has more tokens or other pages."""
        self._promised.clear()

    def pages_promised(self, growth: int) -> int:
        """Return the pages that the running requests still need for their tokens and `growth` more each.

        O(running) for the first of the requests that a step admits, O(1) for the others.
        """
        promised = self._promised.get(growth)
        if promised is None:
            promised = sum([self._pages_after_all(request, growth) for request in self.running])
            self._promised[growth] = promised
        return promised

    def _pages_after_all(self, request: Request, growth: int) -> int:
        """Pages that a running request, or each of its beams, needs for its tokens and `growth` more."""
        if not request.beams:
            return self._pages_after(request, request.lease, growth)
        return sum([self._pages_after(beam, beam.lease, growth) for beam in request.beams])

    def _pages_after(self, request: Request, lease: Lease | None, growth: int) -> int:
        """Pages that a request needs for its tokens and `growth` more; each beam its own, after the prompt."""
        if lease is None:
            return 0
        length = _length_after(request, growth)
        needed = self.cache.pages_needed(lease, length)
        if request.search is not None and request.leader is None:
            size = self.cache.page_size
            needed += (request.width - 1) * (-(-length // size) - request.num_tokens // size)
        return needed

    # --- pages are freed -----------------------------------------------------------------------------------

    def release(self, request: Request, now: float, *, keep: bool) -> None:
        """Take a request out of the queue or the batch and free its pages; with `keep`, its KV stays in the tree.

        A step in flight may still write to its pages. That is safe: their next owner writes in a later step.
        """
        self._release_pages(request, now, keep)
        self.host.forget(request.request_id)
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)

    def _victim(self, step: StepBuilder, request: Request) -> Request | None:
        """Return the last running request after `request` in order that is not part of this step."""
        placed = {(chunk.request.leader or chunk.request).request_id for chunk in step.chunks}
        for candidate in reversed(self.running):
            if candidate is request:
                return None
            if candidate.request_id not in placed:
                return candidate
        return None

    def _preempt(self, step: StepBuilder, request: Request, now: float) -> None:
        """Take a request's pages. Its KV stays in the tree while there is room; if it pays, it is copied to the
        host.
        """
        if request.lease is not None:
            start, end = self.cache.shared_tokens(request.lease), len(self._held_tokens(request))
            copies = self.host.swap_out(request, start, end, self._budget.prefill_rate)
            step.to_host.add(copies)
            is_swapped = bool(copies.pages or copies.states)
            self.is_swapping |= is_swapped
            self.num_swapped += is_swapped
        self._release_pages(request, now, keep=True)
        if request.search is not None:
            beam_group.begin(request)  # the search restarts after the prompt
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._leave(request)
        step.preempted.append(request)
        prefix = self.cache.find(request.namespace, request.looked_up)
        self._enqueue(request, prefix)  # at its old position

    def _release_pages(self, request: Request, now: float, keep: bool) -> None:
        beam_group.end(self.cache, request, now)
        if request.lease is None:
            return
        request.kv_pages_peak = max(request.kv_pages_peak, request.lease.num_pages)
        self.cache.finish(request.lease, self._held_tokens(request) if keep else [], now)
        request.lease = None

    def _held_tokens(self, request: Request) -> Sequence[int]:
        """Return the tokens whose KV its pages hold."""
        assert request.lease is not None
        if self.host.is_loading(request.request_id):  # the step that loads them may still fail
            return ()
        # If it was admitted but is in no step yet, the last page of its match has not been copied.
        return request.tokens[: min(request.num_computed, len(request.lease.pages) * self.cache.page_size)]


def _growth(request: Request) -> int:
    """Tokens of growth for which there must be room at admission: they double with each preemption.

    The number of preemptions is then logarithmic in the number of tokens, instead of one every few tokens.
    """
    return _GROWTH << request.num_preemptions if request.num_preemptions else 1


def _length_after(request: Request, growth: int) -> int:
    num_tokens = len(request.tokens)
    return min(num_tokens + growth, max(request.longest, num_tokens))
