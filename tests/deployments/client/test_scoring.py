"""Requests of evaluation harnesses to the embedded model: sums of log-probabilities are those of transformers.

The requests and the fields read from the answers are those of lm-evaluation-harness 0.4 (`local-completions`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deployments.demo_model
from engine.loading.load_model import load_model
from tests.deployments.support.api_over_engines import Api, api_over
from tests.deployments.support.time_limit import run_scenario
from tests.engine.support.oracle import oracle_logits

MODEL = Path(deployments.demo_model.__file__).parent
REAL: dict[str, Any] = {"load": load_model, "model": "demo", "page_size": 16, "max_model_len": 512}
PAIRS = [
    ("itertools.chain makes an iterator that", " returns elements from the first iterable"),
    ("Return the largest item in", " an iterable"),
    ("Return the largest item in", " zebra ☃ crossings"),
    ("a", "b"),
]
"""Contexts with likely and unlikely continuations."""


async def ask(api: Api, prompts: list[list[int]], **options: Any) -> list[Any]:
    body = {
        "model": "m",
        "prompt": prompts,
        "temperature": 0,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        **options,
    }
    response = await api.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))


def expected(ids: list[int], num_context: int) -> tuple[float, bool]:
    """Return the continuation's log-likelihood, and whether greedy decoding would have generated it."""
    logprobs = torch.log_softmax(oracle_logits(MODEL, ids), dim=-1)[num_context - 1 : -1]
    targets = torch.tensor(ids[num_context:])
    is_greedy = bool((logprobs.argmax(-1) == targets).all())
    return float(logprobs.gather(1, targets[:, None]).sum()), is_greedy


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_are_those_of_transformers(max_tokens: int) -> None:
    async def scenario() -> None:
        async with api_over(1, **REAL) as api:
            contexts = [api.codec.encode(context) for context, _ in PAIRS]
            prompts = [
                context + api.codec.encode(continuation, add_special_tokens=False)
                for context, (_, continuation) in zip(contexts, PAIRS, strict=True)
            ]
            for _ in range(2):  # cold and warm
                choices = await ask(api, prompts, max_tokens=max_tokens)
                for prompt, context, choice in zip(prompts, contexts, choices, strict=True):
                    logprobs = choice["logprobs"]
                    end = len(prompt)
                    assert len(logprobs["token_logprobs"]) == end + max_tokens
                    likelihood, is_greedy = expected(prompt, len(context))
                    continued = logprobs["token_logprobs"][len(context) : end]
                    assert sum(continued) == pytest.approx(likelihood, abs=1e-3)
                    tops = [max(top.values()) for top in logprobs["top_logprobs"][len(context) : end]]
                    assert (continued == tops) == is_greedy
                    assert choice["text"].startswith(api.codec.decode(prompt))

    run_scenario(scenario())


def test_a_text_is_scored_as_its_tokens_are_and_next_to_generated_text() -> None:
    async def scenario() -> None:
        async with api_over(1, **REAL) as api:
            text = "".join(PAIRS[0])
            (whole,) = await ask(api, text, max_tokens=6, n=1)  # type: ignore[arg-type]
            (scored,) = await ask(api, [api.codec.encode(text)], max_tokens=0)
            num = len(scored["logprobs"]["tokens"])
            assert whole["logprobs"]["tokens"][:num] == scored["logprobs"]["tokens"]
            assert whole["logprobs"]["token_logprobs"][1:num] == pytest.approx(
                scored["logprobs"]["token_logprobs"][1:], abs=1e-4
            )
            assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
            ids = api.codec.encode(whole["text"])
            likelihood, is_greedy = expected(ids, num)
            assert is_greedy
            assert sum(whole["logprobs"]["token_logprobs"][num:]) == pytest.approx(likelihood, abs=1e-3)

    run_scenario(scenario())
