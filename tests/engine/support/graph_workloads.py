"""Requests of which most steps can be replayed from graphs, alone and as whole workloads."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cache import Namespace
from engine.program.engine import Engine
from engine.scheduling.stats import EngineLoad
from engine.values.plan import Chunk
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import VOCAB


def sampling_of(rng: random.Random) -> SamplingParams:
    """Draw parameters that graphs mostly support: greedy and temperature; sometimes ones they do not."""
    if rng.random() < 0.8:
        temperature = rng.choice([0.0, 0.0, 0.7, 1.3])
        min_tokens = rng.choice([0, 0, 5])
        return SamplingParams(
            temperature, max_tokens=rng.randint(5, 40), min_tokens=min_tokens, seed=rng.getrandbits(60)
        )
    asked: dict[str, Any] = rng.choice(
        [{"top_k": 5}, {"repetition_penalty": 1.3}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"min_p": 0.1}]
    )
    return SamplingParams(1.0, max_tokens=rng.randint(1, 20), seed=rng.getrandbits(60), **asked)


def play_workload(engine: Engine, seed: int) -> tuple[dict[str, list[int]], EngineLoad]:
    """Run bursts of requests, some begun elsewhere, some aborted. Returns what each got, and the load after."""
    rng, tokens = random.Random(seed), defaultdict[str, list[int]](list)
    shared = [rng.randrange(8, VOCAB) for _ in range(14)]
    for number in range(26):
        prompt = shared[: rng.choice([0, 9, 14])] + [rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 20))]
        given = [rng.randrange(8, VOCAB) for _ in range(rng.choice([0, 0, 3]))]
        engine.loop.submit(engine.new_request(f"r{number}", prompt, sampling_of(rng), output_ids=given))
        for _ in range(rng.choice([0, 0, 1, 9])):
            for event in engine.loop.step():
                tokens[event.request_id] += event.token_ids
        if rng.random() < 0.1:
            engine.loop.abort(f"r{number}")
    while engine.loop.has_work:
        for event in engine.loop.step():
            tokens[event.request_id] += event.token_ids
    account = engine.cache.account()
    assert account.locked == account.private == 0
    engine.loop.stop()
    return tokens, engine.scheduler.load(0.0)


def assert_same_tokens(got: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> None:
    """Compare the tokens of two plays; an abort may strike earlier in one of them."""
    assert set(got) == set(expected)
    for name, tokens in expected.items():
        length = min(len(got[name]), len(tokens))
        assert got[name][:length] == tokens[:length], name


def play_greedily(engine: Engine) -> dict[str, list[int]]:
    """Run requests whose tokens depend on no chance, of many lengths, and half of them with a shared prefix."""
    rng, tokens = random.Random(0), defaultdict[str, list[int]](list)
    shared = [rng.randrange(8, VOCAB) for _ in range(40)]
    greedily = SamplingParams(0.0, max_tokens=30, ignore_eos=True)
    for number in range(20):
        prompt = shared * (number % 2) + [rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 60))]
        engine.loop.submit(engine.new_request(f"r{number}", prompt, greedily))
        for event in engine.loop.step():
            tokens[event.request_id] += event.token_ids
    while engine.loop.has_work:
        for event in engine.loop.step():
            tokens[event.request_id] += event.token_ids
    engine.loop.stop()
    return tokens


def greedy_request(name: str, length: int, **params: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 50, **params})
    return Request.make(name, range(10, 10 + length), sampling, arrival=0.0, seed=5, namespace=Namespace("m"))


def last_chunk_of(request: Request, pages: list[int]) -> Chunk:
    """Return the chunk of the request's last token, with all others computed."""
    return Chunk(request, request.num_tokens - 1, 1, request.tokens[-1:], pages, samples=True)
