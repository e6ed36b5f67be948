"""Computes drafts behind steps (`engine/runner/next_drafts.py`), with a draft model or with a layer.

The loop's thread plans them, and the thread that launches steps launches them. All work of a device is on one
stream, in order of its launch. So a drafter's pages may go to another request while a draft is still to be written
to them: that request's KV is written later. Until a step and the drafts behind it have been launched, the loop
plans nothing for their requests, because it needs the step's result (`Scheduler.needs_results`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from cache import KVCacheManager, OutOfPages
from engine.attention.batch import AttentionBatch
from engine.graphs.chain_graphs import ChainGraphs
from engine.runner.follower import Follower
from engine.runner.model_runner import ModelRunner
from engine.runner.next_drafts import DraftsUnderway, NextDrafts
from engine.runner.token_reader import TokenReader
from engine.values.plan import StepPlan
from engine.values.request import Request

LastStates = Callable[[Request, int], torch.Tensor]
"""Returns the states of a request's last tokens in the last step, [count, hidden_size] (`HiddenStates.last`)."""


class DraftsBehind:
    """Plans and launches them for one drafter."""

    def __init__(self, runner: ModelRunner, chains: ChainGraphs, states: LastStates | None = None) -> None:
        """`runner` and `chains` are the drafter's; `states`: for a layer, those that it reads."""
        self._runner, self._chains, self._states = runner, chains, states
        self._reader = TokenReader(runner.device)

    def plan(self, plan: StepPlan, followers: Mapping[str, Follower], cache: KVCacheManager) -> NextDrafts | None:
        """Plan the drafts behind a step for those of the followers, by request id, that are in it. They have
        computed all tokens known now, and get pages of `cache` for those that the step samples and for the
        drafts. None if the device can draw a draft for none of them.
        """
        num_calls = max(follower.most for follower in followers.values()) - 1
        found, sources, places = [], list[int](), list[int]()
        row = place = 0
        for chunk in plan.chunks:
            place += chunk.num_tokens
            if not chunk.samples:
                continue
            count = chunk.num_drafts + 1
            row += count
            follower = followers.get(chunk.request.request_id)
            if follower is not None and self._has_room(follower, count, num_calls, cache):
                found.append((follower, count))
                sources += range(row - count, row)
                places += range(place - count, place)
        starts = [follower.start_behind(count) for follower, count in found]
        chain = self._chains.plan(starts, num_calls) if found else None
        if chain is None:
            return None
        layout = self._runner.page_size, self._runner.pages.null_page
        rows = {follower.request.request_id: row for row, (follower, _) in enumerate(found)}
        return NextDrafts(
            DraftsUnderway(rows, 1 + num_calls),
            AttentionBatch.from_chunks([follower.chunk_behind(count) for follower, count in found], *layout),
            torch.tensor(sources),
            torch.tensor(places),
            [(follower.request, count) for follower, count in found],
            chain,
            self._compute,
        )

    def _has_room(self, follower: Follower, count: int, num_calls: int, cache: KVCacheManager) -> bool:
        """Whether a draft can begin after any of the `count` tokens that the step samples, and has pages."""
        start = follower.start_behind(count)
        if not self._chains.fits(start, num_calls):
            return False
        try:
            copies = cache.extend(follower.lease, start.position + count + num_calls)
        except OutOfPages:
            return False
        assert not copies, "its first pages were copied before it drafted"
        return True

    def _compute(self, drafts: NextDrafts, ids: torch.Tensor, sampled: torch.Tensor) -> None:
        """Implement `NextDrafts.compute`."""
        drawn = sampled.index_select(0, drafts.sources)
        right = num_right(ids.index_select(0, drafts.places), drawn, drafts.batch)
        last = drafts.batch.qo_indptr[:-1] + right
        before = None
        if self._states is not None:
            before = torch.cat([self._states(request, count) for request, count in drafts.counts])
        # A request without a valid token has ended; its row is computed with any token.
        logits, carried = self._runner.draft_call_behind(drawn.clamp(min=0), drafts.batch, before, last)
        tokens = self._chains.tokens(drafts.chain, logits, carried, right)
        tokens = tokens.clamp(min=0).T.flatten()  # Without a valid choice, too, any token will do.
        drafts.underway.launched(tokens, self._reader.begin(tokens))


def num_right(tried: torch.Tensor, drawn: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Return int64 [R]: how many of each row's draft tokens are right. A row of the batch is its last known token
    and its draft tokens, `tried`, int64 [N]; `drawn`, int64 [N], are the tokens sampled after each.
    """
    num_drafts = batch.qo_indptr.diff() - 1
    most = max(batch.query_lens) - 1
    if not most:
        return num_drafts.long()
    is_right = tried[1:] == drawn[:-1]
    offsets = torch.arange(most, device=tried.device)
    at = (batch.qo_indptr[:-1, None] + offsets).clamp_(max=len(is_right) - 1)
    # Beyond the end of a row are those of the next one.
    return torch.minimum(is_right[at].cumprod(1).sum(1), num_drafts)
