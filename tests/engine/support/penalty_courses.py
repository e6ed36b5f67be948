"""Courses of requests with penalties, on which samplers that keep counts are compared with the reference."""

from __future__ import annotations

import random
from typing import Any

import torch

from cache import Namespace
from engine.sampling.native import NativeSampler
from engine.sampling.sampler import Sampler
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow
from tests.engine.support.sampling_rows import EOS

VOCAB = 70
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.4, "logit_bias": {3: 2.0}},
    {"repetition_penalty": 1.3, "logprobs": 3},
    {},
)


def make_request(prompt: list[int], output: list[int], **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 1000, **sampling})
    return Request.make("r", prompt, params, arrival=0.0, seed=1, namespace=Namespace("m"), output_ids=output)


class History(list[int]):
    """A request's tokens that remember how many of them were read."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.num_read += len(self)
        return super().__iter__()


def play(sampler: Sampler | NativeSampler, seed: int, device: str = "cpu") -> None:
    """Requests join with and without output, sit out steps, leave and are replaced. Rows that verify draft tokens
    share their request; of a tail, some tokens become known and others do not. In each step, adjusted logits and
    tokens are those of the reference, which reads whole histories.
    """
    draw, reference = random.Random(seed), Sampler(EOS)
    alive: list[Request] = []

    def tokens(most: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(0, most))]

    for _ in range(8):
        while len(alive) < 2 or draw.random() < 0.5:
            alive.append(make_request([0, *tokens(20)], tokens(10), **draw.choice(PENALTIES)))
        rows: list[SamplingRow] = []
        for request in draw.sample(alive, draw.randint(1, len(alive))):
            tail = tokens(4)
            first = draw.randint(0, len(tail))
            rows += [SamplingRow(request, request.num_tokens, tail[:end]) for end in range(first, len(tail) + 1)]
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(draw.randrange(2**32)))
        ours, theirs = logits.to(device, copy=True), logits.clone()
        assert sampler.sample(ours, rows)[0].tolist() == reference.sample(theirs, rows)[0].tolist()
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-6)
        for request in {row.request for row in rows}:
            request.tokens += tokens(3)
        alive = [request for request in alive if draw.random() < 0.8]


def read_by_steps(sampler: Sampler | NativeSampler, device: str = "cpu") -> list[int]:
    """How much each of five steps reads of a long history that gains two tokens a step."""
    request = make_request(list(range(VOCAB)) * 500, [5, 6] * 500, repetition_penalty=1.3, frequency_penalty=0.5)
    request.tokens = history = History(request.tokens)
    found = []
    for _ in range(5):
        history.num_read = 0
        sampler.sample(torch.zeros(1, VOCAB, device=device), [SamplingRow(request, request.num_tokens, [7])])
        found.append(history.num_read)
        request.tokens += [7, 8]
    return found


def check_tokens_without_a_logit(sampler: Sampler | NativeSampler, device: str = "cpu") -> None:
    """As those of a draft model with fewer tokens than the target, or the mark of a row without a valid choice."""
    logits = torch.ones(1, VOCAB, device=device)
    request = make_request([2, VOCAB, 2**40], [VOCAB + 1, 3, 3], repetition_penalty=2.0, frequency_penalty=0.25)
    sampler.sample(logits, [SamplingRow(request, request.num_tokens, [-1, 4, VOCAB])])
    expected = torch.ones(1, VOCAB)
    expected[0, 2], expected[0, 3], expected[0, 4] = 0.5, 0.5 - 0.5, 0.5 - 0.25
    assert torch.equal(logits.cpu(), expected)
