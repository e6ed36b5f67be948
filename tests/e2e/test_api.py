"""The OpenAI API of the real application, through the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

MESSAGES: Any = [{"role": "user", "content": "What does itertools.chain do?"}]


@pytest.fixture
def ai(any_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{any_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(ai: openai.OpenAI) -> str:
    return ai.models.list().data[0].id


def chat(ai: openai.OpenAI, model: str, **options: Any) -> Any:
    return ai.chat.completions.create(model=model, messages=MESSAGES, **{"max_tokens": 24, **options})


def complete(ai: openai.OpenAI, model: str, **options: Any) -> Any:
    return ai.completions.create(model=model, **{"prompt": "Return the", "max_tokens": 24, **options})


def test_chat_has_the_same_text_streamed_and_whole(ai: openai.OpenAI, model: str) -> None:
    whole = chat(ai, model, temperature=0)
    chunks = list(chat(ai, model, temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text and text == whole.choices[0].message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == whole.choices[0].finish_reason
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_completions_have_the_same_text_streamed_and_whole(ai: openai.OpenAI, model: str) -> None:
    whole = complete(ai, model, temperature=0)
    chunks = list(complete(ai, model, temperature=0, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text


def test_text_and_token_ids_are_the_same_prompt(ai: openai.OpenAI, model: str, any_url: str) -> None:
    ids = httpx.post(f"{any_url}/tokenize", json={"prompt": "Return the"}, timeout=60).json()["tokens"]
    by_text, by_ids = complete(ai, model, temperature=0), complete(ai, model, temperature=0, prompt=ids)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage.prompt_tokens == len(ids)


def test_a_list_of_prompts_answers_each(ai: openai.OpenAI, model: str) -> None:
    prompts = ["Return the", "Raises an"]
    together = complete(ai, model, temperature=0, prompt=prompts)
    alone = [complete(ai, model, temperature=0, prompt=prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone


def test_echo_returns_the_prompt_before_the_text(ai: openai.OpenAI, model: str) -> None:
    plain = complete(ai, model, temperature=0).choices[0].text
    assert complete(ai, model, temperature=0, echo=True).choices[0].text == "Return the" + plain


def test_the_second_time_the_prompt_is_in_the_cache(ai: openai.OpenAI, model: str) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and then it does so again and again. " * 4
    complete(ai, model, prompt=prompt)
    assert complete(ai, model, prompt=prompt).usage.prompt_tokens_details.cached_tokens > 0


def test_a_stop_string_cuts_the_text(ai: openai.OpenAI, model: str) -> None:
    whole = complete(ai, model, temperature=0, max_tokens=40).choices[0].text
    stop = whole[5:9]
    cut = complete(ai, model, temperature=0, max_tokens=40, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"


def test_the_seed_decides(ai: openai.OpenAI, model: str) -> None:
    def say(seed: int) -> str:
        return str(complete(ai, model, temperature=1.5, seed=seed).choices[0].text)

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(4)}) > 1


def test_choices_are_as_many_as_asked_for(ai: openai.OpenAI, model: str) -> None:
    answer = chat(ai, model, n=3, temperature=1.5, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert chat(ai, model, temperature=1.5, seed=3).choices[0].message.content == answer.choices[0].message.content


def test_logprobs_are_of_the_chosen_tokens(ai: openai.OpenAI, model: str) -> None:
    choice = chat(ai, model, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode(errors="replace") == choice.message.content
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-3)  # greedy: the best one
    legacy = complete(ai, model, temperature=0, logprobs=2).choices[0].logprobs
    assert all(len(top) in (2, 3) for top in legacy.top_logprobs)


def test_an_answer_reports_the_time_of_its_phases(ai: openai.OpenAI, model: str, any_url: str) -> None:
    asked = {"include_timings": True}
    raw = ai.with_raw_response.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=16, extra_body=asked, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers.get_list("x-request-id") == ["mine"]
    timings = raw.parse().timings  # type: ignore[attr-defined]
    assert timings["replica"] == raw.headers["x-raydix-replica"]
    assert timings["output_tokens"] == raw.parse().usage.completion_tokens  # type: ignore[union-attr]
    phases = [timings[name] for name in ("queue_s", "prefill_s", "decode_s")]
    assert min(phases) >= 0 and 0 < sum(phases) <= timings["total_s"]
    *_, last = complete(ai, model, stream=True, extra_body=asked)
    assert last.choices == [] and last.timings["time_to_first_token_s"] <= last.timings["total_s"]
    refused = httpx.post(f"{any_url}/v1/completions", json={}, headers={"x-request-id": "mine-too"}, timeout=60)
    assert refused.status_code == 400 and refused.headers.get_list("x-request-id") == ["mine-too"]
    assert len(httpx.get(f"{any_url}/nope", timeout=60).headers.get_list("x-request-id")) == 1


def test_the_small_endpoints(ai: openai.OpenAI, model: str, any_url: str) -> None:
    assert ai.models.retrieve(model).id == model
    with httpx.Client(base_url=any_url, timeout=60) as http:
        assert http.get("/health").json()["status"] in ("healthy", "degraded")
        assert http.get("/ready").json() == {"ready": True}
        assert (http.head("/health").status_code, http.head("/health").content) == (200, b"")
        assert http.get("/version/").json()["version"]
        assert "raydix_" in http.get("/metrics").text
        tokens = http.post("/tokenize", json={"prompt": "Grüße 🌍"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "Grüße 🌍"}
