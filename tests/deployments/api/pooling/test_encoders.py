"""Encoders through the API, the client, the wire and real engines."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.replica.liveness import prove_step
from engine.loading.load_encoder import load_encoder
from engine.model_config.tasks import Task
from engine.text.tokenizer import load_tokenizer
from tests.deployments.support.api_over_engines import Api, api_over
from tests.deployments.support.in_process_engines import is_nothing_left, until
from tests.engine.support.encoders import save_encoder, their_score, their_states

TEXTS = ["a heap", "the largest items of a list", "nothing"]
QUERY = "the largest items"


def over(model: Path, task: Task, **settings: Any) -> AbstractAsyncContextManager[Api]:
    return api_over(1, load=load_encoder, model=str(model), files=model, tasks=[task], device="cpu", **settings)


async def answer(api: Api, path: str, **fields: Any) -> dict[str, Any]:
    response = await api.http.post(path, json={"model": "m", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def refused(api: Api, path: str, **fields: Any) -> str:
    response: httpx.Response = await api.http.post(path, json={"model": "m", **fields})
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def test_embeddings_and_what_is_refused(tmp_path: Path) -> None:
    model = save_encoder("modernbert", tmp_path, "mean_tokens")
    encode = load_tokenizer(model).encode
    states = [their_states(model, encode(text)).mean(0) for text in TEXTS]
    expected = np.array([(state / state.norm()).numpy() for state in states])

    async def play() -> None:
        async with over(model, "embed") as api:
            for _ in range(2):
                found = await answer(api, "/v1/embeddings", input=TEXTS)
                assert np.array([one["embedding"] for one in found["data"]]) == pytest.approx(expected, abs=1e-5)
                assert found["usage"]["prompt_tokens"] == sum(len(encode(text)) for text in TEXTS)
                assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            ids = await answer(api, "/v1/embeddings", input=[encode(text) for text in TEXTS])
            assert np.array([one["embedding"] for one in ids["data"]]) == pytest.approx(expected, abs=1e-5)
            score = await answer(api, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1])
            assert score["data"][0]["score"] == pytest.approx(float(expected[0] @ expected[1]), abs=1e-5)
            told = await refused(api, "/v1/completions", prompt="a heap", max_tokens=4)
            assert "is an encoder, served to embed, not to generate: use /v1/embeddings, or name another" in told
            assert "128" in await refused(api, "/v1/embeddings", input=[[5] * 129])
            assert "128" in await refused(api, "/v1/embeddings", input="heap " * 200)
            cut = await answer(api, "/v1/embeddings", input="heap " * 200, truncate_prompt_tokens=-1)
            assert cut["usage"]["prompt_tokens"] == 128
            await until(lambda: is_nothing_left(api.client, api.engines))

    asyncio.run(play())


@pytest.mark.parametrize("family", ["xlm_roberta", "modernbert"])
def test_pairs_are_scored_as_transformers_does(tmp_path: Path, family: str) -> None:
    model = save_encoder(family, tmp_path, head=True)
    tokenizer: Any = load_tokenizer(model)
    expected = [their_score(model, tokenizer(QUERY, text)["input_ids"]) for text in TEXTS]

    async def play() -> None:
        async with over(model, "rerank") as api:
            ranked = await answer(api, "/v1/rerank", query=QUERY, documents=TEXTS)
            found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
            assert [found[place] for place in range(3)] == pytest.approx(expected, abs=1e-5)
            assert [one["index"] for one in ranked["results"]] == sorted(range(3), key=lambda at: -expected[at])
            scored = await answer(api, "/v1/score", text_1=[QUERY, TEXTS[0], QUERY], text_2=TEXTS)
            others = [expected[0], their_score(model, tokenizer(TEXTS[0], TEXTS[1])["input_ids"]), expected[2]]
            assert [one["score"] for one in scored["data"]] == pytest.approx(others, abs=1e-5)
            spelled = await answer(api, "/v1/score", text_1=QUERY, text_2="a </s> heap")
            assert spelled["data"][0]["score"] != pytest.approx(
                their_score(model, tokenizer(QUERY, "a </s> heap")["input_ids"]), abs=1e-7
            )
            cut = await answer(api, "/v1/score", text_1="heap", text_2="list " * 200, truncate_prompt_tokens=20)
            assert cut["usage"]["prompt_tokens"] == 20
            told = await refused(api, "/v1/embeddings", input="a heap")
            assert "is an encoder, served to rerank, not to embed: use /v1/rerank or /v1/score" in told
            assert "takes no instruction" in await refused(
                api, "/v1/rerank", query=QUERY, documents=TEXTS, instruction="find"
            )
            message = await refused(api, "/v1/score", text_1="heap", text_2="a", truncate_prompt_tokens=5)
            assert message.startswith("truncate_prompt_tokens must be above 5")
            await until(lambda: is_nothing_left(api.client, api.engines))

    asyncio.run(play())


@pytest.mark.parametrize("has_head", [False, True])
def test_a_replica_proves_that_it_computes(tmp_path: Path, has_head: bool) -> None:
    from engine.program.engine import Engine
    from engine.settings.config import EngineConfig

    prove_step(Engine.from_config(EngineConfig(model=str(save_encoder("modernbert", tmp_path, head=has_head)))))
