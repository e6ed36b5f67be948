"""Embeddings through the API, the client, the wire and real engines of the embedded model."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from deployments.api import TextCodec
from deployments.api.pooling.judge import Judge, asked
from engine import LLM
from engine.loading.load_model import load_model
from engine.model_files.model_directory import demo_model_path
from tests.deployments.support.api_over_engines import Api, api_over
from tests.deployments.support.in_process_engines import SILENCE, is_nothing_left, until
from tests.engine.support.oracle import oracle_logits

TEXTS = ["Return the largest item", "heapq", "Return the smallest item of an iterable"]
ENGINE: dict[str, Any] = {"load": load_model, "model": "demo", "kv_pages": 256, "page_size": 16}


async def embed(api: Api, **fields: Any) -> dict[str, Any]:
    response = await api.http.post("/v1/embeddings", json={"model": "m", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_embeddings_are_those_of_the_engine_cold_and_warm() -> None:
    expected = LLM("demo", tasks=["embed"], kv_pages=64, page_size=16).embed(TEXTS)

    async def play() -> None:
        async with api_over(1, tasks=["generate", "embed"], **ENGINE) as api:
            cached = []
            for _ in range(3):
                answer = await embed(api, input=TEXTS)
                found = np.array([one["embedding"] for one in answer["data"]])
                assert found == pytest.approx(np.array(expected), abs=1e-4)
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            all_but_the_last = answer["usage"]["prompt_tokens"] - len(TEXTS)
            assert cached[0] < all_but_the_last and cached[1:] == [all_but_the_last] * 2
            await until(lambda: is_nothing_left(api.client, api.engines))

    asyncio.run(play())


def test_embeddings_run_next_to_answers_without_changing_them() -> None:
    async def play() -> None:
        async with api_over(1, tasks=["generate", "embed"], **ENGINE) as api:
            alone = await api.complete(temperature=0, max_tokens=24)
            text = alone.json()["choices"][0]["text"]
            together = await asyncio.gather(
                api.complete(temperature=0, max_tokens=24, cache_salt="other"),
                *(embed(api, input=[text, "a b c", "word " * 60]) for text in TEXTS),
            )
            assert together[0].json()["choices"][0]["text"] == text
            await until(lambda: is_nothing_left(api.client, api.engines))

    asyncio.run(play())


def test_scores_are_the_probabilities_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model's vocabulary has no "yes": another token stands for it."""
    single = TextCodec.single_token
    monkeypatch.setattr(TextCodec, "single_token", lambda self, text: 77 if text == "yes" else single(self, text))
    documents = ["a heap", "a list of items", "nothing"]

    async def play() -> None:
        async with api_over(1, tasks=["rerank"], **ENGINE) as api:
            judge = Judge.of(api.codec, "m")
            expected = []
            for document in documents:
                prompt = judge.encode(asked("heapq", document, None), 512)
                last = oracle_logits(demo_model_path(), prompt)[-1]
                expected.append(float(last[list(judge.answers)].softmax(-1)[0]))
            for num_cached in (False, True):
                body = {"model": "m", "query": "heapq", "documents": documents}
                answer = (await api.http.post("/v1/rerank", json=body)).json()
                found = {one["index"]: one["relevance_score"] for one in answer["results"]}
                assert [found[index] for index in range(3)] == pytest.approx(expected, rel=1e-3, abs=1e-6)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached == answer["usage"]["prompt_tokens"] - 3) is num_cached
            await until(lambda: is_nothing_left(api.client, api.engines))

    asyncio.run(play())


@pytest.mark.parametrize(
    ("tasks", "path", "body", "message"),
    [
        (["embed"], "/v1/completions", {"prompt": "hi", "max_tokens": 2}, "served to embed, not to generate"),
        (["embed"], "/v1/completions", {"prompt": "hi", "stream": True}, "add generate to engine.tasks"),
    ],
)
def test_an_engine_holds_to_its_tasks(tasks: list[str], path: str, body: dict[str, Any], message: str) -> None:
    async def play() -> None:
        async with api_over(1, tasks=tasks, **ENGINE) as api:
            response = await api.http.post(path, json={"model": "m", **body})
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
            await until(lambda: is_nothing_left(api.client, api.engines))

    asyncio.run(play())


def test_a_replica_that_dies_has_its_prompts_computed_elsewhere() -> None:
    """Nothing of them was sent, so they are retried, whatever they had got to."""

    async def play() -> None:
        async with api_over(2, health=SILENCE) as api:
            api.engines.runners[0].gate.clear()
            asked = asyncio.create_task(embed(api, input=[[1, 2, 3], [4, 5]], normalize=False))
            await until(lambda: api.engines.replicas[0].wire.num_live == 2)
            await asyncio.to_thread(api.engines.replicas[0].wire.close)
            answer = await asked
            assert [one["embedding"] for one in answer["data"]] == [[3.0, 3.0], [2.0, 5.0]]
            assert set(api.engines.calls) == {"r0", "r1"}

    asyncio.run(play())


def test_a_client_that_leaves_frees_the_engines() -> None:
    async def play() -> None:
        async with api_over(1) as api:
            api.engines.runners[0].gate.clear()
            asked = asyncio.create_task(embed(api, input=[list(range(40)), [4, 5], [6]]))
            await until(lambda: api.engines.replicas[0].wire.num_live == 3)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            api.engines.runners[0].gate.set()
            await until(lambda: is_nothing_left(api.client, api.engines))

    asyncio.run(play())
