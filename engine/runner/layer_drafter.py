"""Drafts with a layer that reads the model's hidden states (`engine/models/draft_layer.py`).

It is a draft model whose input at position i is the token there and the model's state at i - 1. After the last
known token, its own states continue:

    request.tokens           t0   t1   t2   t3 | draft tokens
    the model's states       h0   h1   h2      |
    input of the layer            t1   t2   t3 |  d4   d5
                                  h0   h1   h2 |  g3   g4        g: the layer's own

KV computed from the layer's own states is computed again once the model's are known. Only the states of the last
tokens are kept, and there are none of tokens whose KV came from a cache. Where states are missing, the layer's
context begins after the gap; positions only matter relative to each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from engine.attention.batch import AttentionBatch
from engine.graphs.chain_graphs import ChainGraphs
from engine.graphs.step_graphs import CutCapture
from engine.graphs.token_graphs import TokenGraphs
from engine.models.draft_layer import DraftLayer
from engine.runner.draft_model import DraftModel
from engine.runner.follower import Follower
from engine.runner.hidden_states import HiddenStates
from engine.runner.model_runner import ModelRunner
from engine.values.plan import StepPlan, StepResult
from engine.values.request import Request


class LayerRunner(ModelRunner):
    """Runs the layer, with KV pages of its own."""

    _before: torch.Tensor | None = None
    """[N, hidden_size]: the states before the tokens of a graph, for as many as the largest has."""

    def add_token_graphs(
        self, max_running: int, max_tokens: int, widths: Sequence[int], capture: CutCapture
    ) -> TokenGraphs:
        """Make graphs as `ModelRunner.add_token_graphs` does."""
        most = max([0, *(size.num_tokens for size in self._sizes_of_rows(widths, max_running))])
        shape = most, self.model_config.hidden_size
        self._before = torch.zeros(shape, dtype=self._decoder_type, device=self.device)
        return super().add_token_graphs(max_running, max_tokens, widths, capture)

    @torch.inference_mode()
    def predict(self, plan: StepPlan, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a plan; `before` are the states at the position before each token, [N, hidden_size]. Returns the
        logits, float32, and the layer's own states of the tokens that sample.
        """
        step = self.read(plan, self.device)
        assert step.batch is not None and isinstance(self.decoder, DraftLayer)
        self._copy_pages(step)
        hidden = step.sampling(self._after(step.ids, step.batch, before))
        return self.decoder.logits(hidden), self.decoder.continuing(hidden)

    def _after(self, token_ids: torch.Tensor, batch: AttentionBatch, before: torch.Tensor) -> torch.Tensor:
        """Return the layer's states of tokens, [N, hidden_size], which the next call may overwrite."""
        count = len(token_ids)
        if self._before is not None and count <= len(self._before):
            self._before[:count] = before
            return self._hidden(token_ids, batch)[0]
        hidden: torch.Tensor = self.decoder(token_ids, self._prepare(batch), self.pages, before)
        return hidden

    def draft_call_behind(
        self, token_ids: torch.Tensor, batch: AttentionBatch, before: torch.Tensor | None, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute tokens as `ModelRunner.draft_call_behind` does."""
        assert before is not None and isinstance(self.decoder, DraftLayer)
        hidden = self._after(token_ids, batch, before).index_select(0, last)
        return self.decoder.logits(hidden), self.decoder.continuing(hidden)

    def _layers(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        assert self._before is not None
        before = self._before[: len(token_ids)]
        hidden: torch.Tensor = self.decoder(token_ids, self._prepare(batch), self.pages, before)
        return hidden

    @property
    def carried_size(self) -> int:
        """Numbers of a state of the layer."""
        return self.model_config.hidden_size

    def _draft_call(
        self, token_ids: torch.Tensor, batch: AttentionBatch, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.decoder, DraftLayer)
        hidden = self.decoder(token_ids, self._prepare(batch), self.pages, carried)
        return self.decoder.logits(hidden), self.decoder.continuing(hidden)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan as if all states before were zero, and sample nothing: a warm-up."""
        shape = plan.num_tokens, self.model_config.hidden_size
        self.predict(plan, torch.zeros(shape, dtype=self.kv_dtype, device=self.device))
        return StepResult((), ())


class LayerDrafter(DraftModel):
    """Drafts with the layer. Requests that begin alike share its KV."""

    reuses_drafts = False

    def __init__(
        self,
        runner: LayerRunner,
        hidden: HiddenStates,
        eos_token_ids: Collection[int],
        max_prefill_tokens: int,
        chains: ChainGraphs | None = None,
    ) -> None:
        """`hidden`: the model's states; the other arguments as for `DraftModel`."""
        super().__init__(runner, eos_token_ids, max_prefill_tokens, chains)
        self._layer, self._hidden = runner, hidden
        self._own: dict[str, torch.Tensor] = {}  # the layer's last state of each request that drafts

    def _follow(self, request: Request) -> Follower:
        follower = super()._follow(request)
        if self._hidden.first(request) < follower.num_computed:
            return follower
        self.forget(request)  # Later hidden states have replaced those that it needs next.
        follower = super()._follow(request)
        follower.num_computed = max(follower.num_computed, self._hidden.first(request) + 1)
        return follower

    def _take_over(self, follower: Follower) -> None:
        super()._take_over(follower)
        self._hidden.take(follower.request, follower.num_known - 2, 1)  # Those before are needed no more.

    def _begin(self, request: Request) -> Follower:
        """Continue the KV of a request that began alike, or begin where the hidden states do."""
        tokens, start = request.tokens, self._hidden.first(request) + 1
        space = request.namespace._replace(adapter=f"{request.namespace.adapter} after {tokens[0]}")
        match = self.cache.match(space, tokens[1:], self._num_calls)
        if match.length + 1 >= start:
            return Follower(request, self.cache.lock(match), match.length + 1, len(tokens), first=1)
        nothing = self.cache.match(space, tokens[1:2], self._num_calls)
        return Follower(request, self.cache.lock(nothing), start, len(tokens), first=start, is_shared=False)

    def _logits(self, plan: StepPlan, batch: Sequence[Follower]) -> torch.Tensor:
        if batch[0].draft:
            before = self._carried(batch)
        else:
            parts = [
                part
                for follower, chunk in zip(batch, plan.chunks, strict=True)
                for part in self._hidden.take(follower.request, chunk.start + follower.first - 1, chunk.num_tokens)
            ]
            before = torch.cat(parts)
        logits, own = self._layer.predict(plan, before)
        self._own = {
            chunk.request.request_id: row for chunk, row in zip(plan.sampling_chunks, own[:, None], strict=True)
        }
        return logits

    def _carried(self, batch: Sequence[Follower]) -> torch.Tensor:
        """Return the layer's own last states."""
        return torch.cat([self._own[follower.request.request_id] for follower in batch])
