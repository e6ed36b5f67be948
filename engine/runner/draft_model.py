"""A second, smaller model that drafts the tokens of the first one (Leviathan et al. 2023, arXiv:2211.17192).

The draft model has its own KV pages, and its own counter of computed tokens for each request:

    request.tokens    [ known at its last draft | tokens the step gave     ]
    its KV            [ computed                | accepted draft tokens    ] rejected ones are overwritten

It samples from its own distribution with the noise, parameters and penalties that the model will use at the same
position. Two models that nearly agree then nearly always draw the same token, at any temperature.

On a GPU, graphs draw all draft tokens of a request that needs no host for this, and the host reads them together.
Where the last step had draft tokens, it need not even begin them (`engine/runner/next_drafts.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from cache import KVCacheManager, OutOfPages, PageCopy
from engine.attention.pinned import on_host, to_device
from engine.graphs.chain_graphs import ChainGraphs
from engine.runner.drafts_behind import DraftsBehind
from engine.runner.follower import Follower
from engine.runner.next_drafts import NextDrafts
from engine.sampling.native import NativeSampler
from engine.sampling.sampler import Sampler, sampler_for
from engine.values.plan import Chunk, StepPlan
from engine.values.request import PENDING, Request
from engine.values.sampling_row import SamplingRow


class LogitsRunner(Protocol):
    """A model with KV pages that returns logits; in Raydix always a `ModelRunner`."""

    @property
    def num_pages(self) -> int:
        """Number of its KV pages."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def max_model_len(self) -> int:
        """The longest context it supports, in tokens."""

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's KV and return the logits, float32 [sampling chunks, vocab_size]."""


class DraftModel:
    """Drafts with a model. When its own pages run out, a request continues without draft tokens."""

    reuses_drafts = True
    """Whether the KV of accepted draft tokens is what it would have computed from the request's tokens."""

    def __init__(
        self,
        runner: LogitsRunner,
        eos_token_ids: Collection[int],
        max_prefill_tokens: int = 512,
        chains: ChainGraphs | None = None,
    ) -> None:
        """`eos_token_ids` are those of the model that is drafted for; `max_prefill_tokens` as in `Speculation`;
        `chains`: the runner's, to continue drafts without the host.
        """
        self._runner, self._chains = runner, chains
        self._eos = eos_token_ids
        self._sampler: Sampler | NativeSampler | None = None  # Chosen once the logits' device is known.
        self._max_prefill_tokens = max_prefill_tokens
        self.cache = KVCacheManager(runner.num_pages, runner.page_size)
        self._followers: dict[str, Follower] = {}
        self._num_calls = 0  # Serves as its cache's clock.
        self.behind: DraftsBehind | None = None
        """Computes drafts behind steps, if `after` is called with each of these; None without graphs."""
        self._drafting: list[str] = []  # the requests for which it has drafted since the last step
        self._next: NextDrafts | None = None  # the drafts behind the last step
        self._error: Exception | None = None  # with which these could not be planned

    @property
    def has_begun(self) -> bool:
        """Implement `Drafter.has_begun`."""
        return self._next is not None

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        """Implement `Drafter.propose`. A new request gets draft tokens once its prompt has been computed. Those
        drafted behind the last step are `PENDING`.
        """
        self._num_calls += 1
        most = {
            request: min(count, self._runner.max_model_len - request.num_tokens + 1)
            for request, count in zip(requests, max_tokens, strict=True)
        }
        drafts = self._drafts_behind(most)
        drafts |= self._drafts_now({request: count for request, count in most.items() if request not in drafts})
        self._drafting += [request.request_id for request, draft in drafts.items() if draft]
        return [drafts.get(request, ()) for request in requests]

    def _drafts_behind(self, most: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        """Return the drafts that were computed behind the last step, of up to so many tokens. Raises the error
        with which they could not be.
        """
        behind = self._next
        if self._error is not None:
            raise self._error
        if behind is None:
            return {}
        behind.underway.check()
        drafts: dict[Request, Sequence[int]] = {}
        for request, count in most.items():
            follower = self._followers.get(request.request_id)
            if follower is not None and request.request_id in behind.underway.rows:
                self._take_over(follower)
                follower.most = count
                drafts[request] = [PENDING] * min(count, behind.underway.width)
        return drafts

    def _drafts_now(self, most: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        """Draft up to so many tokens, and wait for them; requests without a draft may be left out."""
        room = self._max_prefill_tokens
        batch: list[Follower] = []
        copies: list[PageCopy] = []
        for request, count in most.items():
            follower = self._follow(request)
            follower.want(count, room)
            if follower.num_given and self._has_pages(follower, copies):
                batch.append(follower)
                room -= follower.num_given if follower.is_filling else 0
        found = batch
        if batch:
            self._catch_up(batch, copies)
        while batch := [follower for follower in batch if follower.wants_more]:
            self._draft([follower.next_chunk() for follower in batch], batch)
        return {follower.request: follower.draft for follower in found}

    def after(self, plan: StepPlan) -> NextDrafts | None:
        """Plan the drafts to compute behind a step, for requests for which it drafted. Call it once for each step,
        when it is prepared.
        """
        names, self._drafting, self._next = self._drafting, [], None
        followers = {name: self._followers[name] for name in names if name in self._followers}
        if self.behind is not None and followers and plan.num_drafts:
            try:
                self._next = self.behind.plan(plan, followers, self.cache)
            except Exception as error:  # `propose` raises it, so that this step does not fail.
                self._error = error
        return self._next

    def forget(self, request: Request) -> None:
        """Implement `Drafter.forget`. The computed KV stays in its cache while there is room."""
        follower = self._followers.pop(request.request_id, None)
        if follower is not None:
            follower.roll_back(reuses_drafts=self.reuses_drafts)
            # The last page of a match is copied only when the lease is extended.
            num_held = len(follower.lease.pages) * self._runner.page_size
            self.cache.finish(follower.lease, follower.reusable(num_held), self._num_calls)

    def _take_over(self, follower: Follower) -> None:
        """Note that all tokens of a request were computed behind the last step."""
        follower.mark_computed()

    def _follow(self, request: Request) -> Follower:
        """Return the state of a request, rolled back to the accepted part of the last draft."""
        follower = self._followers.get(request.request_id)
        if follower is None:
            follower = self._followers[request.request_id] = self._begin(request)
        follower.roll_back(reuses_drafts=self.reuses_drafts)
        return follower

    def _begin(self, request: Request) -> Follower:
        lease = self.cache.lock(self.cache.match(request.namespace, request.tokens, self._num_calls))
        return Follower(request, lease, lease.num_cached, request.num_tokens)

    def _has_pages(self, follower: Follower, copies: list[PageCopy]) -> bool:
        """Allocate pages for all its tokens and its draft. Without room, it releases the request's state."""
        try:
            end = follower.num_known + follower.most - 1
            copies += self.cache.extend(follower.lease, end - follower.first)
        except OutOfPages:
            self.forget(follower.request)
            return False
        return True

    def _catch_up(self, batch: list[Follower], copies: list[PageCopy]) -> None:
        """Compute missing KV within the given room; requests that have caught up get their first draft token."""
        batch.sort(key=lambda follower: follower.num_given)  # Decode rows come first.
        self._draft([follower.missing_chunk() for follower in batch], batch, copies)
        for follower in batch:
            self.cache.release_copy(follower.lease)
            if follower.is_filling:
                self.cache.insert(follower.lease, follower.reusable(), self._num_calls)

    def _draft(self, chunks: Sequence[Chunk], batch: Sequence[Follower], copies: Sequence[PageCopy] = ()) -> None:
        """Compute chunks, one for each in the batch, and draft a token where they reach the last token; further
        ones too if no more of them need the host.
        """
        logits = self._logits(StepPlan(tuple(chunks), tuple(copies)), batch)
        ready = [follower for follower, chunk in zip(batch, chunks, strict=True) if chunk.samples]
        if not ready:
            return
        for follower, tokens in zip(ready, self._drawn(ready, logits), strict=True):
            follower.take(tokens)

    def _drawn(self, ready: Sequence[Follower], logits: torch.Tensor) -> Iterable[Sequence[int]]:
        """Draw the next draft token of each, and on the device those that follow it, and read them together."""
        if self._chains is not None and (num_calls := max(follower.num_wanted for follower in ready) - 1):
            chain = self._chains.plan([follower.chain_start() for follower in ready], num_calls)
            if chain is not None:
                drafts = self._chains.tokens(to_device(chain, logits.device), logits, self._carried(ready))
                return zip(*on_host(drafts).tolist(), strict=True)
        rows = [SamplingRow(follower.request, follower.num_known, tuple(follower.draft)) for follower in ready]
        self._sampler = self._sampler or sampler_for(self._eos, logits.device)
        return zip(on_host(self._sampler.sample(logits, rows)[0]).tolist(), strict=True)

    def _logits(self, plan: StepPlan, batch: Sequence[Follower]) -> torch.Tensor:
        """Compute a plan with one chunk for each in the batch; return as `LogitsRunner.logits`."""
        return self._runner.logits(plan)

    def _carried(self, batch: Sequence[Follower]) -> torch.Tensor | None:
        """Return [R, `ModelRunner.carried_size`]: what the last call carried over for the batch, if anything."""
        return None
