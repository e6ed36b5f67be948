"""Run a model runner's steps by hand: requests, pages and chunks without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from cache import Namespace, PageCopy
from engine.loading.load_model import load_model
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import VOCAB


def load_runner(model: Path, page_size: int = 16, kv_tokens: int = 1024, **settings: Any) -> ModelRunner:
    pages = kv_tokens // page_size
    return load_model(EngineConfig(model=str(model), page_size=page_size, kv_pages=pages, threads=1, **settings))


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


_NUMBERS = count()


class RequestByHand:
    """A request, its page table and how far it is computed, which a scheduler would keep track of. Ids differ, as
    graphs tell requests apart by them.
    """

    def __init__(self, tokens: Sequence[int], pages: Sequence[int], computed: int = 0) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=1000)
        id_ = f"r{next(_NUMBERS)}"
        self.request = Request.make(id_, list(tokens), sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
        self.pages = list(pages)
        self.computed = computed

    def chunk(self, num_tokens: int | None = None) -> Chunk:
        """The next tokens of this request: all that are left when no number is given."""
        tokens = self.request.tokens
        start, end = self.computed, len(tokens) if num_tokens is None else self.computed + num_tokens
        self.computed = end
        return Chunk(self.request, start, end - start, tokens[start:end], self.pages, samples=end == len(tokens))


def pages_of(page_size: int, first_token: int, num_tokens: int) -> range:
    """Pages for `num_tokens` tokens, from token slot `first_token` of the pool on."""
    first = first_token // page_size
    return range(first, first + -(-num_tokens // page_size))


def run_step(
    runner: ModelRunner, rows: Sequence[tuple[RequestByHand, int | None]], copies: Sequence[PageCopy] = ()
) -> None:
    """Run one step; sampled tokens are appended to their requests."""
    plan = StepPlan(tuple(row.chunk(n) for row, n in rows), tuple(copies))
    result = runner.run(plan)
    for chunk, token in zip(plan.sampling_chunks, result.token_ids, strict=True):
        chunk.request.tokens.append(token)
