"""Decides which tokens are computed next.

There is one rule: a request gets tokens until `num_computed` reaches `num_tokens`. A step is filled in this order:

    decodes     every running request with one token to compute
    prompts     as many tokens as the time they take allows (engine/scheduling/prefill_budget.py),
                shared so that each makes progress (engine/scheduling/prefill_sharing.py)

Deferrable requests, those of batches, use the remaining time: none in a step that computes another's prompt, and
in a step with other decodes only as much as makes these a little slower.

`schedule` returns the step as a value, and `apply` applies its result. While a step is in flight, the next one can
be planned. Nothing else changes a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from cache import CacheStats, KVCacheManager, Namespace, PageAccount
from engine.drafting.speculator import Speculator
from engine.grammar.failure import explain
from engine.host_tier.host_kv import HostKV
from engine.host_tier.lender import Lender
from engine.scheduling.extensions import beam_group
from engine.scheduling.extensions.micro_batches import MicroBatches
from engine.scheduling.extensions.recurrent import plan_state
from engine.scheduling.fits import check_fits
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.prefill_budget import PrefillBudget
from engine.scheduling.prefill_sharing import PrefillSharing
from engine.scheduling.queue_policy import policy_named, position_of
from engine.scheduling.stats import EngineLoad
from engine.scheduling.step_builder import StepBuilder
from engine.scheduling.waiting_queue import WaitingQueue, precedence
from engine.settings.scheduling import SchedulerSettings
from engine.tenants.tenant_shares import Sharers, in_turn, within_shares
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.plan import Chunk, StepPlan, StepResult
from engine.values.request import PENDING, Request, Status
from engine.values.sampling_row import SamplingRow
from engine.values.stream_delta import STEP_FAILED, FinishReason, StreamDelta


class Scheduler:
    """Owns the requests of one engine, from `add` to their last delta. Not thread-safe: the loop calls it."""

    def __init__(
        self,
        cache: KVCacheManager,
        settings: SchedulerSettings,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        host: HostKV | None = None,
        speculator: Speculator | None = None,
        *,
        whole_prompts: bool = False,
        num_micro_batches: int = 1,
    ) -> None:
        """`max_model_len` bounds the prompt and output tokens of a request.

        Without `host`, KV stays in the tree or is computed again. Without a `speculator` every decode yields one
        token. With `whole_prompts`, each is computed in one step, by itself if it is longer than a step should be.
        `num_micro_batches` steps may be in flight in a pipeline.
        """
        self.num_micro_batches = num_micro_batches
        """Most steps in flight in a pipeline; 1 without one."""
        self._micro_batches = MicroBatches(num_micro_batches)
        self.cache = cache
        self._page_size = cache.page_size
        # A request that fits in all pages by itself will fit, so no admitted request is stuck forever.
        self.max_model_len = min(max_model_len, cache.most_tokens(cache.num_pages))
        """Most prompt and output tokens of a request."""
        self._max_running, self._max_step_tokens = settings.max_running, settings.max_step_tokens
        self._eos = frozenset(eos_token_ids)
        self._policy = policy_named(settings.policy, settings.priority_half_life_s)
        max_seconds = None if settings.max_step_ms is None else settings.max_step_ms / 1000
        self._budget = PrefillBudget(settings.max_step_tokens, max_seconds, settings.max_step_stretch)
        self._sharing = PrefillSharing(settings.fair_quantum_tokens, whole_prompts=whole_prompts)
        self.speculator = speculator or Speculator()
        self._requests: dict[str, Request] = {}
        self._sharers = Sharers()
        self.waiting = WaitingQueue(settings.max_waiting, settings.max_waiting_tokens)
        host = host or HostKV(page_size=cache.page_size)
        cache.on_evict = host.on_evict
        if cache.resume_points is not None:
            cache.resume_points.on_give_up = host.on_give_up
        self.allocator = KVAllocator(cache, self.waiting, settings.max_running, host, self._budget)
        self.lender = Lender(cache, host)
        """Prefixes lent to other engines, between two steps."""
        self._ending: dict[str, FinishReason] = {}  # requests to end between two steps, and why
        self._num_steps = self._num_finished = self._num_in_flight = self._num_planned = 0
        self._drafts_in_flight = 0
        self._num_elsewhere = 0  # decodes that a step without any delays, in a pipeline

    def share(self, namespace: Namespace, token_ids: Sequence[int]) -> int:
        """Share computed tokens with all namespaces for good (`KVCacheManager.share`); return how many of them.

        Requests can no longer use these pages, and may have to be shorter from now on.
        """
        num_shared = self.cache.share(namespace, token_ids)
        room = self.cache.num_pages - self.cache.num_shared_pages
        self.max_model_len = min(self.max_model_len, self.cache.most_tokens(room))
        return num_shared

    # --- requests ------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise NeverFits if the request can never be served, however long it waits. Has no side effects."""
        check_fits(request, self.max_model_len, self.cache, self._max_running)

    def add(self, request: Request, now: float) -> None:
        """Put a request in the queue, between two steps.

        Raises NeverFits, QueueFull, or ValueError when the id is in use.
        """
        self.check(request)
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        self.waiting.check_room(request)
        params = request.sampling
        request.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        max_tokens = 1 if request.pooling is not None else params.max_tokens
        # A prompt that fills the context is computed although the request ends there.
        request.longest = max(min(request.num_prompt + max_tokens, self.max_model_len), request.num_prompt + 1)
        if params.beams is not None:
            beam_group.begin(request)
        request.queue_position = position_of(request, self._policy)
        self._requests[request.request_id] = request
        self._sharers.add(request)
        self.allocator.welcome(request, now)
        last = request.tokens[-1]
        if request.num_resumed and (reason := self._finish_reason(request, last, request.num_tokens)):
            # Its previous engine was lost between its last token and the report that the request had ended.
            self._ending[request.request_id] = reason

    def abort(self, request_id: str) -> None:
        """End a request before the next step; unknown and finished ids are ignored."""
        if request_id in self._requests:
            self._ending.setdefault(request_id, "abort")

    def reset_cache(self) -> int:
        """Forget all prefixes that no request and no loan uses; return the number of freed pages, host pages
        included.
        """
        return self.cache.reset() + self.allocator.host.reset()

    def take_in_transfers(self) -> None:
        """Note the pages that moved to host memory or below it; called while there is nothing to plan."""
        self.allocator.host.take_in_transfers()

    # --- planning a step -----------------------------------------------------------------------------------

    @property
    def needs_results(self) -> bool:
        """Whether the steps in flight have to end before the next one can be planned."""
        running, speculator = self.allocator.running, self.speculator
        if self.allocator.is_starved or self.allocator.is_swapping:
            return True
        return self.num_micro_batches == 1 and (  # else a request that decodes waits for its result in any case
            self._drafts_in_flight > 0
            or any(request.needs_previous_result for request in running)
            or (speculator.is_on and any(r.tokens[-1] == PENDING and speculator.wants(r) for r in running))
        )

    def expected_seconds(self, plan: StepPlan) -> float:
        """Predict how long a step takes on the device, in seconds; 0 until one was measured."""
        return self._budget.seconds(plan.num_decodes + plan.num_drafts, plan.num_prefill)

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step and take the pages that it needs. A plan without chunks means no work.

        Steps may be in flight unless `needs_results`: the tokens that they sample are `PENDING` until they are
        applied.
        """
        ended = [self._end(self._requests[id_], reason, now) for id_, reason in list(self._ending.items())]
        step, allocator = StepBuilder(), self.allocator
        self._micro_batches.begin_step(is_drained=allocator.is_starved or allocator.is_swapping)
        allocator.begin_step(is_in_flight=self._num_in_flight > 0, leaves_room=self._sharers.to_leave_room(now))
        allocator.preempt_for_waiting(step, now, is_shared=self._sharers.are_several)
        self._place_decodes(step, now)
        self._sharing.charge(step.chunks)
        self._place_prompts(step, now)
        for request in step.preempted:
            if request.status is Status.WAITING:  # otherwise it started again in the room of others
                self.speculator.forget(request)
        step.to_host.add(allocator.host.take_copies())
        plan = step.build(ended)
        self._num_in_flight += not plan.is_empty
        self._drafts_in_flight += plan.num_drafts
        return plan

    def _place_decodes(self, step: StepBuilder, now: float) -> None:
        """Give each running request its next token, and deferrable ones if others leave room for them."""
        urgent: list[Request] = []
        for request in self.allocator.running:
            num_tokens = len(request.tokens)
            if num_tokens - request.num_planned > 1 and not request.beams:
                step.prompts.append(request)
            elif num_tokens < request.longest or request.beams:  # else a step in flight samples its last token
                (step.deferrable if request.is_deferrable else urgent).append(request)
        ready = self._micro_batches.among(urgent)
        self._num_elsewhere = ready.num_elsewhere
        self._decode(step, ready.take(self._with_shares(step, ready.requests, now)), now)
        ready = self._micro_batches.among(step.deferrable)
        step.deferrable = ready.requests
        if step.deferrable and not self._num_urgent_prompts(step):
            count = self._budget.num_deferrable_decodes(len(step.chunks), is_brief=self._sharers.were_urgent(now))
            self._decode(step, ready.take(step.deferrable[:count]), now)

    def _with_shares(self, step: StepBuilder, decodes: list[Request], now: float) -> list[Request]:
        """Return the requests that decode in this step, of one or several tenants, in order of precedence."""
        if not self._sharers.were_several(now):
            return decodes
        self._num_planned += 1
        others = itertools.chain(step.prompts, self.waiting) if self._sharers.are_several else ()
        shares = within_shares(decodes, others, self._num_planned)
        if shares is None:  # The others probably return, and would wait for this step.
            count = self._budget.num_in_brief_step()
            return sorted(in_turn(decodes, count, self._num_planned * count), key=precedence)
        within, beyond = shares
        if beyond:
            within += beyond[: self._budget.num_above_share(len(within))]
            within.sort(key=precedence)  # because those last in order are preempted first
        return within

    def _decode(self, step: StepBuilder, requests: Sequence[Request], now: float) -> None:
        searches = [request for request in requests if request.beams]
        decodes = [request for request in requests if not request.beams] if searches else requests
        for request in searches:
            if request.status is Status.RUNNING and self.allocator.grow_beams(step, request, now):
                for beam in request.beams:
                    self._place(step, beam, beam.num_to_compute, now)
        num_tokens = sum([chunk.num_tokens for chunk in step.chunks]) + len(decodes)
        proposals = self.speculator.propose(decodes, self._max_step_tokens - num_tokens)
        for request, drafts in zip(decodes, proposals, strict=True):
            if request.status is Status.RUNNING:  # otherwise an earlier one preempted it
                self._place(step, request, 1, now, drafts)

    def _num_urgent_prompts(self, step: StepBuilder) -> int:
        """Number of prompts that could get tokens and are not deferrable."""
        num_running = sum(prompt.status is Status.RUNNING and not prompt.is_deferrable for prompt in step.prompts)
        num_prompts = num_running + self._num_startable(len(self.waiting) - self.waiting.num_deferrable)
        if num_prompts < 2 or not self._sharers.are_several:
            return num_prompts
        # While others wait, all prompts of one tenant together may slow steps down as much as one prompt.
        prompts = itertools.chain(step.prompts, self.waiting)
        return min(num_prompts, len({prompt.tenant for prompt in prompts if not prompt.is_deferrable}))

    def _num_startable(self, num_waiting: int) -> int:
        return min(num_waiting, self._max_running - len(self.allocator.running))

    def _place_prompts(self, step: StepBuilder, now: float) -> None:
        """Share the step's room for prefill, and admit waiting requests that get some of it."""
        num_decodes = sum([chunk.num_tokens for chunk in step.chunks]) or self._num_elsewhere
        num_prompts = self._num_urgent_prompts(step)
        num_deferrable = len(step.prompts) + self._num_startable(self.waiting.num_deferrable)
        if num_prompts or not num_deferrable:
            room = self._budget.room(num_decodes, num_prompts)
        else:
            has_others = self._num_elsewhere > 0 or any(not chunk.request.is_deferrable for chunk in step.chunks)
            room = self._budget.deferrable_room(
                num_decodes,
                num_deferrable,
                has_others=has_others,
                is_brief=self._sharers.were_urgent(now),
            )
        num_pending = self.waiting.num_uncached + sum([prompt.num_to_compute for prompt in step.prompts])
        room.tokens = self._micro_batches.prompt_tokens(room.tokens, num_pending)
        shares = self._sharing.share(step, self.allocator, room, now)
        for prompt, num_tokens in shares.items():
            if prompt.status is not Status.RUNNING or not self._place(step, prompt, num_tokens, now):
                self._sharing.give_back(prompt, num_tokens)
        if not step.chunks:  # No other prompt waits for this step.
            self._decode(step, step.deferrable, now)

    def _place(
        self, step: StepBuilder, request: Request, num_tokens: int, now: float, drafts: Sequence[int] = ()
    ) -> bool:
        """Give `request` tokens in this step, and draft tokens after them; False if its pages have no room, or if
        the mask of its grammar is not computed yet.
        """
        tokens, start, lease = request.tokens, request.num_planned, request.lease
        end = start + num_tokens
        assert lease is not None
        is_slow = request.constraint is not None and request.constraint.pace.is_slow
        if is_slow and end == len(tokens) and not _has_mask(request):
            return False
        if drafts and (is_slow or not self.allocator.has_spare(lease, end + len(drafts))):
            drafts = ()
        # A prompt takes all its pages together, so that no other request gets those promised to it.
        wanted = len(tokens) + len(drafts)
        chunk = start, end + len(drafts)
        if wanted > lease.capacity and not self.allocator.grow(step, request, wanted, chunk, now):
            return False
        ids, is_last = tokens[start:end], end == len(tokens)
        if drafts:
            ids += drafts
        samples = is_last and request.pooling is None
        state = None if lease.state is None else plan_state(request, start, end, has_drafts=bool(drafts))
        step.chunks.append(
            Chunk(request, start, len(ids), ids, lease.pages, samples, len(drafts), state, lease.window)
        )
        request.num_planned = end
        if is_last:
            tokens.append(PENDING)
            self.allocator.forget_promises()
            if not samples:
                step.pooled.append(step.chunks[-1])
        return True

    # --- applying a result ---------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, now: float, seconds: float = 0.0) -> list[StreamDelta]:
        """Apply the result of the oldest step in flight, which took `seconds`; returns its requests' deltas."""
        self.allocator.host.copied(plan)
        events, token_ids, scores = [], list(result.token_ids), result.prompt_logprobs
        found: dict[Request, list[TokenLogprobs | None]] = {}  # search -> the candidates of its beams
        counts = itertools.repeat(1) if result.counts is None else iter(result.counts)
        first = 0
        for chunk in plan.chunks:
            request = chunk.request
            end = first + next(counts) if chunk.samples else first
            if request.status is Status.RUNNING:  # otherwise it ended while the step ran
                self._computed(chunk, request, end - first, now)
                if chunk.num_drafts:
                    self.speculator.verified(request, chunk.num_drafts, end - first - 1)
                if scores and request.request_id in scores:
                    events.append(self._scored(request, scores[request.request_id]))
                if end > first and request.search is not None:
                    found.setdefault(request.leader or request, []).append(result.logprobs[first])
                elif end > first:
                    logprobs = result.logprobs[first:end]
                    events.append(self._generated(request, token_ids[first:end], logprobs, now))
            first = end
        for request, rows in found.items():
            events += self._searched(request, rows, now)
        for chunk in plan.pooled:
            if chunk.request.status is Status.RUNNING:
                events.append(self._pooled(chunk.request, result.pooled[chunk.request.request_id], now))
        if plan.chunks:
            num_decodes = plan.num_decodes + plan.num_drafts
            self._budget.observe(num_decodes, plan.num_prefill, seconds, plan.prefill_context)
            self.speculator.stepped(len(plan.chunks), plan.num_drafts, plan.num_prefill, now)
        self._num_steps += 1
        self._num_in_flight -= 1
        self._drafts_in_flight -= plan.num_drafts
        return events

    def fail(self, plan: StepPlan, message: str, now: float) -> list[StreamDelta]:
        """End all requests of a step that failed. The content of their pages is unknown, so no KV is kept."""
        self._num_in_flight -= 1
        self._drafts_in_flight -= plan.num_drafts
        self.allocator.host.failed(plan)
        ended = [
            self._end(chunk.request.leader or chunk.request, "error", now, keep=False, error=message)
            for chunk in plan.chunks
            if chunk.request.status is Status.RUNNING
        ]
        for delta in ended:
            delta.error_code = STEP_FAILED
        return ended

    def _computed(self, chunk: Chunk, request: Request, num_sampled: int, now: float) -> None:
        """Record that the KV of a chunk is computed, except that of rejected draft tokens."""
        num_drafts, lease = chunk.num_drafts, request.lease
        assert lease is not None
        end = chunk.start + chunk.num_tokens - num_drafts
        request.num_computed = end
        if num_drafts:
            request.num_computed = request.num_planned = end - 1 + num_sampled
        if lease.source is not None:
            self.cache.release_copy(lease)
        # A decode's tokens enter the tree when it ends; a prompt that was swapped in enters immediately.
        num_prompt = len(request.prompt_ids)
        if (
            chunk.num_tokens - num_drafts > 1
            or end <= num_prompt
            or lease.num_shared * self._page_size < num_prompt
        ):
            self.cache.insert(lease, request.tokens[:end], now)
        if lease.state is not None:
            self.cache.keep_states(lease, request.tokens, end)

    def _scored(self, request: Request, scores: PackedLogprobs) -> StreamDelta:
        request.num_prompt_reported = scores.end
        return StreamDelta(request.request_id, num_cached=request.num_cached or 0, prompt_logprobs=scores)

    def _generated(
        self, request: Request, tokens: list[int], logprobs: Sequence[TokenLogprobs | None], now: float
    ) -> StreamDelta:
        """Replace the `PENDING` token by the sampled ones, up to the token that ends the request."""
        num_tokens = num_known = request.num_computed + 1 - len(tokens)
        reason: FinishReason | None = None
        for token in tokens:
            num_tokens += 1
            if token < 0:
                output = [*request.tokens[request.num_prompt : num_known], *tokens[: num_tokens - num_known - 1]]
                return self._no_token(request, token, output, now)
            if token in request.stop_ids or num_tokens >= request.longest:
                reason = self._finish_reason(request, token, num_tokens)
                if reason is not None:
                    tokens = tokens[: num_tokens - num_known]
                    break
        request.tokens[num_known : num_known + 1] = tokens
        if request.first_token_at is None:
            request.first_token_at = now
        reported = None if logprobs[0] is None else [each for each in logprobs[: len(tokens)] if each is not None]
        if reason is not None:
            del request.tokens[num_tokens:]  # including a token that a step in flight samples
            return self._end(request, reason, now, tokens=tokens, logprobs=reported)
        _has_mask(request)  # Begin to compute it while the next step is planned.
        timings = None
        if request.num_preemptions_reported != request.num_preemptions:
            request.num_preemptions_reported, timings = request.num_preemptions, request.timings(now)
        return StreamDelta(request.request_id, tokens, 0, request.num_cached or 0, None, timings, reported)

    def _pooled(self, request: Request, values: bytes, now: float) -> StreamDelta:
        """End a request whose prompt is computed."""
        del request.tokens[request.num_prompt :]
        request.first_token_at = now
        if not values:
            return self._no_token(request, -1, (), now)
        ended = self._end(request, "stop", now)
        ended.pooled = values
        return ended

    def _searched(self, request: Request, rows: Sequence[TokenLogprobs | None], now: float) -> list[StreamDelta]:
        """Choose the next beams of a search from a step's candidates; returns its only delta when it is over."""
        assert request.search is not None
        if request.first_token_at is None:
            request.first_token_at = now
        known = [row for row in rows if row is not None]
        if len(known) == len(rows) and beam_group.advance(self.cache, request, known, now):
            return []
        best = request.search.finished[: request.search.params.num_returned]
        if len(known) < len(rows) or not best:
            return [self._no_token(request, -1, (), now)]
        ended = self._end(request, best[0].finish_reason, now, tokens=list(best[0].token_ids))
        ended.alternatives = list(best)
        return [ended]

    def _no_token(self, request: Request, token: int, output: Sequence[int], now: float) -> StreamDelta:
        """End a request after `output`, because a sampler returned only this invalid token."""
        ended = self._end(request, "error", now, keep=False)
        text_of = None if request.constraint is None else request.constraint.text
        ended.error, ended.error_code = explain(token, output, text_of)
        return ended

    def _finish_reason(self, request: Request, token: int, num_tokens: int) -> FinishReason | None:
        """Return why a request ends with `token` as the last of `num_tokens`; None if it continues."""
        is_long_enough = num_tokens - request.num_prompt > request.sampling.min_tokens
        # A grammar that allows only the end takes precedence over `min_tokens`.
        if token in request.stop_ids and (is_long_enough or request.constraint is not None):
            return "stop"
        return "length" if num_tokens >= request.longest else None

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        keep: bool = True,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> StreamDelta:
        """End a request and release its pages and states. With `keep`, its KV stays in the tree."""
        self.allocator.release(request, now, keep=keep)
        self.speculator.forget(request)
        request.status = Status.FINISHED
        del self._requests[request.request_id]
        self._sharers.remove(request)
        self._ending.pop(request.request_id, None)
        self._num_finished += reason != "error"  # errors do not count as throughput
        return StreamDelta(
            request.request_id,
            tokens or [],
            0,
            request.num_cached or 0,
            reason,
            request.timings(now),
            logprobs,
            error,
        )

    # --- reports -------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a call of `schedule` would do anything."""
        return bool(self._requests)

    def account(self) -> PageAccount:
        """Count the pages by state; the counts always sum to `cache.num_pages`."""
        return self.cache.account()

    def load(self, now: float) -> EngineLoad:
        """Return a snapshot of how busy this engine is. O(requests)."""
        deferrable = [request for request in self._requests.values() if request.is_deferrable]
        return EngineLoad(
            num_running=len(self.allocator.running),
            num_waiting=len(self.waiting),
            num_deferred=min(self.allocator.num_deferred, len(self.waiting)),
            waiting_prefill_tokens=self.waiting.num_uncached + sum(map(_to_prefill, self.allocator.running)),
            requests_of=self._sharers.largest() if self._is_full else {},
            num_deferrable=len(deferrable),
            deferrable_prefill_tokens=sum(map(_to_prefill, deferrable)),
            oldest_wait_seconds=max((now - request.arrival for request in self.waiting), default=0.0),
            pages=self.account(),
            states=self.cache.state_account(),
            page_size=self.cache.page_size,
            eviction_age=self.cache.eviction_age(now),
            cache=self.cache.stats.copy(),
            num_steps=self._num_steps,
            num_preemptions=self.allocator.num_preemptions,
            num_swapped=self.allocator.num_swapped,
            host_pages=self.allocator.host.account(),
            host_traffic=self.allocator.host.traffic,
            num_host_evicted=self.allocator.host.num_evicted,
            lower_tier=self.allocator.host.lower_totals(),
            peers=self.allocator.host.peer_totals(),
            num_finished=self._num_finished,
            # Measured by the time until a step comes back, in which a full pipeline computes all its steps.
            prefill_rate=self._budget.prefill_rate * self.num_micro_batches,
            decode_seconds=self._budget.decode_seconds,
        )

    @property
    def _is_full(self) -> bool:
        """Whether another request would wait."""
        return bool(len(self.waiting)) or len(self.allocator.running) >= self._max_running

    def forget_totals(self) -> None:
        """Reset the counters to 0; measured rates stay."""
        self._num_steps = self._num_finished = 0
        self.allocator.num_preemptions = self.allocator.num_swapped = 0
        self.cache.stats = CacheStats()
        self.cache.page_ages.drain()


def _to_prefill(request: Request) -> int:
    """Tokens of its prompt that are to be computed."""
    if request.status is Status.WAITING:
        return request.num_tokens - request.num_expected_cached
    return request.num_to_compute if request.num_to_compute > 1 else 0


def _has_mask(request: Request) -> bool:
    """Whether the step that samples the request's next token need not wait for its grammar."""
    constraint = request.constraint
    if constraint is None or not constraint.pace.is_slow:
        return True
    return request.tokens[-1] != PENDING and constraint.is_ready(SamplingRow.of(request))
