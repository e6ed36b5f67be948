"""A second, smaller model that drafts the tokens of the first one (Leviathan et al. 2023, arXiv:2211.17192).

The draft model has its own KV pages, and its own counter of computed tokens for each request:

    request.tokens    [ known at its last draft | tokens the step gave     ]
    its KV            [ computed                | accepted draft tokens    ] rejected ones are overwritten

It samples from its own distribution with the noise, parameters and penalties that the model will use at the same
position. Two models that nearly agree then nearly always draw the same token, at any temperature.

On a GPU, the first draft tokens stay there, and graphs draw those that follow: the host reads them all together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cache import KVCacheManager, Lease, OutOfPages, PageCopy
from engine.attention.pinned import on_host
from engine.graphs.chain_graphs import ChainGraphs, ChainStart
from engine.sampling.native import NativeSampler
from engine.sampling.sampler import Sampler, sampler_for
from engine.values.plan import Chunk, StepPlan, num_accepted
from engine.values.request import Request
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

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        """Implement `Drafter.propose`. A new request gets draft tokens once its prompt has been computed."""
        self._num_calls += 1
        room = self._max_prefill_tokens
        batch: list[Follower] = []
        copies: list[PageCopy] = []
        for request, most in zip(requests, max_tokens, strict=True):
            follower = self._follow(request)
            follower.want(min(most, self._runner.max_model_len - request.num_tokens + 1), room)
            if follower.num_given and self._has_pages(follower, copies):
                batch.append(follower)
                room -= follower.num_given if follower.is_filling else 0
        if batch:
            self._catch_up(batch, copies)
        while batch := [follower for follower in batch if follower.wants_more]:
            self._draft([follower.next_chunk() for follower in batch], batch)
        followers = (self._followers.get(request.request_id) for request in requests)
        return [follower.draft if follower is not None else () for follower in followers]

    def forget(self, request: Request) -> None:
        """Implement `Drafter.forget`. The computed KV stays in its cache while there is room."""
        follower = self._followers.pop(request.request_id, None)
        if follower is not None:
            follower.roll_back(reuses_drafts=self.reuses_drafts)
            # The last page of a match is copied only when the lease is extended.
            num_held = len(follower.lease.pages) * self._runner.page_size
            self.cache.finish(follower.lease, follower.reusable(num_held), self._num_calls)

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
        rows = [SamplingRow(follower.request, follower.num_known, tuple(follower.draft)) for follower in ready]
        self._sampler = self._sampler or sampler_for(self._eos, logits.device)
        first = self._sampler.sample(logits, rows)[0]
        for follower, tokens in zip(ready, self._continued(ready, first), strict=True):
            follower.take(tokens)

    def _continued(self, ready: Sequence[Follower], first: torch.Tensor) -> Iterable[Sequence[int]]:
        """Read the next draft token of each, `first`, int64 [R], and those that follow it on the device."""
        if self._chains is not None and (num_calls := max(follower.num_wanted for follower in ready) - 1):
            starts = [follower.chain_start() for follower in ready]
            drafts = self._chains.tokens(starts, first, self._carried(ready), num_calls)
            if drafts is not None:
                return zip(*on_host(drafts).tolist(), strict=True)
        return zip(on_host(first).tolist(), strict=True)

    def _logits(self, plan: StepPlan, batch: Sequence[Follower]) -> torch.Tensor:
        """Compute a plan with one chunk for each in the batch; return as `LogitsRunner.logits`."""
        return self._runner.logits(plan)

    def _carried(self, batch: Sequence[Follower]) -> torch.Tensor | None:
        """Return [R, `ModelRunner.carried_size`]: what the last call carried over for the batch, if anything."""
        return None


@dataclass(slots=True)
class Follower:
    """The draft model's state of one request."""

    request: Request
    lease: Lease
    num_computed: int
    """Number of leading tokens whose KV it has: the request's, then its own draft tokens."""
    num_known: int
    """Number of the request's tokens when it last drafted."""
    draft: list[int] = field(default_factory=list)
    """Draft tokens that follow the known ones."""
    most: int = 0
    """Number of draft tokens wanted now."""
    num_given: int = 0
    """Number of known tokens to compute now."""
    is_filling: bool = False
    """Whether these are a prompt's."""
    first: int = 0
    """Number of leading tokens of the request that are left out: the first slot of its pages is that of the next
    one."""
    is_shared: bool = True
    """Whether other requests may use its KV."""

    def roll_back(self, *, reuses_drafts: bool) -> None:
        """Keep the KV of the accepted part of the last draft, unless drafts are not reused. The rest, and always
        the last token, is computed again.
        """
        tokens = self.request.tokens
        accepted = num_accepted(self.draft, tokens[self.num_known :]) if reuses_drafts else 0
        self.num_computed = min(self.num_computed, self.num_known + accepted, len(tokens) - 1)
        self.num_known, self.draft = len(tokens), []

    def want(self, most: int, room: int) -> None:
        """Ask for up to `most` draft tokens. At most `room` tokens of a prompt are computed first."""
        self.most = most
        missing = self.num_known - self.num_computed
        self.is_filling = missing > most + 1  # This is more than a step can leave uncomputed.
        self.num_given = min(missing, room) if self.is_filling else missing
        if most <= 0:
            self.num_given = 0

    def missing_chunk(self) -> Chunk:
        """Return the next `num_given` known tokens as a chunk."""
        start = self.num_computed
        self.num_computed = end = start + self.num_given
        ids = self.request.tokens[start:end]
        return Chunk(self.request, start - self.first, len(ids), ids, self.lease.pages, end == self.num_known)

    def next_chunk(self) -> Chunk:
        """Return the last draft token as a chunk."""
        self.num_computed += 1
        place = self.num_computed - 1 - self.first
        return Chunk(self.request, place, 1, self.draft[-1:], self.lease.pages, True)

    def reusable(self, most: int | None = None) -> Sequence[int]:
        """Return the tokens, at most so many, whose KV others may use."""
        if not self.is_shared:
            return ()
        computed = self.request.tokens[self.first : self.num_computed]
        return computed[:most]

    def chain_start(self) -> ChainStart:
        """Return the place of its next draft token, which need not be known."""
        return ChainStart(self.request, self.num_computed - self.first, self.first, self.lease.pages)

    def take(self, tokens: Sequence[int]) -> None:
        """Append draft tokens, of which all but the last have been computed, as long as more are wanted. The draft
        ends after a token that ends the request, or without a valid choice.
        """
        for index, token in enumerate(tokens):
            if index:
                if not self.wants_more:
                    return
                self.num_computed += 1
            if token >= 0:
                self.draft.append(token)
            if token < 0 or token in self.request.stop_ids:
                self.most = len(self.draft)

    @property
    def num_wanted(self) -> int:
        """Number of draft tokens that are still wanted."""
        return self.most - len(self.draft)

    @property
    def wants_more(self) -> bool:
        """Whether it has caught up and more draft tokens are wanted."""
        return 0 < len(self.draft) < self.most
