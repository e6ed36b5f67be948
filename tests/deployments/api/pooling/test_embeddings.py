"""POST /v1/embeddings: its fields, its answers, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any, cast

import openai
import pytest

from deployments.api.output import response_encoder
from deployments.client.protocol import Overloaded
from engine.values.stream_delta import StreamDelta
from monitoring.metrics import Metrics
from tests.deployments.api.pooling.conftest import SIZE, Make, Pooled
from tests.deployments.support.scripted_api import hang_up, scripted_values
from tests.support.metric_values import count_of

PATH = "/v1/embeddings"
MIXED = "input must be text, token ids (integers), or an array of either, not mixed."


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def state_of(pooled: Pooled, at: int = -1) -> list[float]:
    """The engine's values of one of the prompts that it got."""
    packed = scripted_values(pooled.engine.requests[at])
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def scaled(state: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in state))
    return [value / length for value in state]


def test_one_text_has_one_embedding(embedder: Pooled) -> None:
    answer = embedder.answer(PATH, input="hello world", user="u-1")
    assert (answer["object"], answer["model"]) == ("list", "demo")
    (one,) = answer["data"]
    assert (one["object"], one["index"]) == ("embedding", 0)
    assert one["embedding"] == pytest.approx(scaled(state_of(embedder)), rel=1e-6)
    (asked,) = embedder.engine.requests
    assert asked.prompt_ids == embedder.engine.codec.encode("hello world")
    count = len(asked.prompt_ids)
    details = {"cached_tokens": 0}
    assert answer["usage"] == {
        "prompt_tokens": count,
        "total_tokens": count,
        "prompt_tokens_details": details,
    }


def test_inputs_are_texts_or_token_ids(embedder: Pooled) -> None:
    encode = embedder.engine.codec.encode
    for given, prompts in (
        ("one", [encode("one")]),
        (["one", "two words"], [encode("one"), encode("two words")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        embedder.engine.requests.clear()
        answer = embedder.answer(PATH, input=given)
        assert [request.prompt_ids for request in embedder.engine.requests] == prompts
        found = [scaled(state_of(embedder, at)) for at in range(len(prompts))]
        assert vectors(answer) == [pytest.approx(one, rel=1e-6) for one in found]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_base64_has_the_same_float32s(embedder: Pooled) -> None:
    fields = {"input": ["one", "two words"], "dimensions": 3}
    plain = vectors(embedder.answer(PATH, **fields, encoding_format="float"))
    for vector, packed in zip(
        plain, vectors(embedder.answer(PATH, **fields, encoding_format="base64")), strict=True
    ):
        assert isinstance(packed, str)
        assert list(struct.unpack("<3f", base64.b64decode(packed))) == vector


def test_dimensions_are_cut_before_they_are_scaled(embedder: Pooled) -> None:
    for count in (1, 2, SIZE):
        (vector,) = vectors(embedder.answer(PATH, input="some words", dimensions=count))
        assert vector == pytest.approx(scaled(state_of(embedder)[:count]), rel=1e-6)
    (vector,) = vectors(embedder.answer(PATH, input="some words", normalize=False))
    assert vector == state_of(embedder)
    (vector,) = vectors(embedder.answer(PATH, input="some words", use_activation=False, dimensions=2))
    assert vector == state_of(embedder)[:2]


def test_an_instruction_is_put_before_each_text(embedder: Pooled) -> None:
    embedder.answer(PATH, input=["what?", "who?"], instruction="Find the answer")
    encode = embedder.engine.codec.encode
    assert [request.prompt_ids for request in embedder.engine.requests] == [
        encode(f"Instruct: Find the answer\nQuery:{text}") for text in ("what?", "who?")
    ]


def test_an_instruction_counts_with_each_text(make: Make) -> None:
    """A small body becomes no huge prompts."""
    it = make("embed", max_body_bytes=4096, max_total_body_bytes=16_384)
    asked = {"instruction": "i" * 500, "input": ["a"] * 9}
    param, message = it.refused(PATH, **asked)
    assert param == "instruction" and "limits.max_body_bytes" in message
    assert len(it.answer(PATH, **asked | {"input": ["a"] * 8})["data"]) == 8


def test_many_embeddings_are_encoded_a_few_at_a_time(embedder: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"input": [[number, 7] for number in range(5, 12)]}
    whole = embedder.answer(PATH, **asked)["data"]
    monkeypatch.setattr("deployments.api.pooling.embeddings.STEP_NUMBERS", 2 * SIZE)
    encode, steps = response_encoder.encode_json, list[int]()

    def noted(values: Any) -> bytes:
        if isinstance(values, list) and values and "embedding" in values[0]:
            steps.append(len(values))
        return encode(values)

    monkeypatch.setattr(response_encoder, "encode_json", noted)
    assert embedder.answer(PATH, **asked)["data"] == whole and steps == [2, 2, 2, 1]


def test_hints_go_to_the_engines(embedder: Pooled) -> None:
    answer = embedder.answer(
        PATH, input="hi", priority=-3, cache_salt="s", prompt_cache_key="k", include_timings=True
    )
    (asked,) = embedder.engine.requests
    assert (asked.priority, asked.session_id) == (-3, "k")
    assert asked.salt.endswith("s")
    assert answer["timings"]["prompt_tokens"] == len(asked.prompt_ids)
    embedder.answer(PATH, input="hi", service_tier="flex")
    assert embedder.engine.requests[-1].priority == 1


def test_prompts_are_shortened_when_asked(make: Make) -> None:
    embedder = make("embed", max_model_len=8)
    ids = embedder.engine.codec.encode("some text of quite a few words that does not fit at all")
    for fields, kept in (
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": -1}, ids[-8:]),
    ):
        embedder.answer(PATH, input="some text of quite a few words that does not fit at all", **fields)
        assert embedder.engine.requests[-1].prompt_ids == kept


def test_a_prompt_may_take_the_whole_context(make: Make) -> None:
    embedder = make("embed", max_model_len=8)
    embedder.answer(PATH, input=list(range(8)))
    param, message = embedder.refused(PATH, input=[[1], list(range(9))])
    assert param == "input.1"
    assert message.startswith("This model's maximum context length is 8 tokens") and message.endswith("has 9.")
    assert embedder.refused(PATH, input="word " * 3000)[0] == "input"


def test_cached_tokens_are_reported(embedder: Pooled) -> None:
    embedder.engine.cached = 2
    response = embedder.post(PATH, input=["one", "two"])
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert response.headers["x-raydix-cached-tokens"] == "2"
    assert response.headers["x-raydix-replica"] == "replica-1"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input is required."),
        ({"input": None}, "input", "input must be text, token ids, or an array of either."),
        ({"input": 5}, "input", "input must be text, token ids, or an array of either."),
        ({"input": []}, "input", "input is empty: it needs at least one text."),
        ({"input": ""}, "input", "input is empty; it needs at least one token."),
        ({"input": ["a", ""]}, "input.1", "input.1 is empty; it needs at least one token."),
        ({"input": [[1], []]}, "input.1", "input.1 is empty; it needs at least one token."),
        ({"input": ["a", 5]}, "input", MIXED),
        ({"input": ["a", [5]]}, "input", MIXED),
        ({"input": [True]}, "input", MIXED),
        ({"input": [1.5]}, "input", MIXED),
        ({"input": [5, 4096]}, "input", "input has the token id 4096, but the model's ids are 0 to 4095."),
        ({"input": [[5], [-1]]}, "input.1", "input.1 has the token id -1, but the model's ids are 0 to 4095."),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be an integer in [1, 4], got 0."),
        ({"input": "a", "dimensions": 5}, "dimensions", "dimensions must be an integer in [1, 4], got 5."),
        ({"input": "a", "dimensions": "4"}, "dimensions", "dimensions must be an integer, got '4'."),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format",
         "encoding_format must be one of float, base64, got 'int8'."),
        ({"input": "a", "normalize": 1}, "normalize", "normalize must be true or false, got 1."),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation",
         "normalize and use_activation differ; give one of them."),
        ({"input": [5], "instruction": "x"}, "instruction",
         "instruction goes with texts, not with token ids; leave it out."),
        ({"input": "a", "instruction": 5}, "instruction", "instruction must be a string, got 5."),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens",
         "truncate_prompt_tokens must be an integer in [1, 512], got 0."),
        ({"input": "a", "priority": 101}, "priority",
         "priority must be an integer in [-100, 100] (limits.max_priority), got 101."),
        ({"input": "a", "messages": [{}]}, "messages",
         "messages with this value is not supported by this server; leave it out."),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_its_field(
    embedder: Pooled, fields: dict[str, Any], param: str, message: str
) -> None:
    assert embedder.refused(PATH, **fields) == (param, message)


def test_a_model_that_generates_is_told_the_setting(make: Make) -> None:
    param, message = make("generate").refused(PATH, input="hi")
    assert param == "model"
    assert message == (
        "The model demo cannot do that: this model is served to generate, not to embed: add embed to "
        "engine.tasks, or name another model."
    )


def test_unknown_fields_are_named(embedder: Pooled) -> None:
    response = embedder.post(PATH, input="hi", embed_dtype="float16")
    assert response.status_code == 200
    assert response.headers["x-raydix-ignored-fields"] == "embed_dtype"


def test_openais_client_reads_both_encodings(embedder: Pooled) -> None:
    """Without `encoding_format` the client asks for base64, and unpacks it."""

    async def ask(client: openai.AsyncOpenAI) -> list[openai.types.CreateEmbeddingResponse]:
        arguments: dict[str, Any] = {"model": "demo", "input": ["one", "two words"]}
        return [
            await client.embeddings.create(**arguments),
            await client.embeddings.create(**arguments, encoding_format="float", dimensions=2),
        ]

    packed, plain = cast("list[openai.types.CreateEmbeddingResponse]", embedder.client.run(ask))
    assert packed.usage.total_tokens == packed.usage.prompt_tokens > 0
    assert [one.embedding for one in packed.data] == [
        pytest.approx(scaled(state_of(embedder, at)), rel=1e-6) for at in (0, 1)
    ]
    assert [len(one.embedding) for one in plain.data] == [2, 2]


def test_a_failure_is_an_error_object(embedder: Pooled) -> None:
    embedder.engine.fail_after = (0, StreamDelta("x", finish_reason="error", error="NaN"))
    response = embedder.post(PATH, input=["a", "b"])
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
    assert all(generation.closed for generation in embedder.engine.generations)
    embedder.engine.refuse_with = Overloaded("full", 3.0)
    response = embedder.post(PATH, input="a")
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


def test_a_client_that_leaves_ends_all_its_prompts(embedder: Pooled) -> None:
    embedder.engine.hangs = True
    sent = asyncio.run(hang_up(embedder.service, {"model": "demo", "input": ["a", "b", "c"]}, PATH))
    assert not sent
    assert len(embedder.engine.generations) == 3
    assert all(generation.closed for generation in embedder.engine.generations)


def test_requests_are_counted(embedder: Pooled, metrics: Metrics) -> None:
    embedder.answer(PATH, input=["a", "b"])
    embedder.refused(PATH, input="")
    asked = {"endpoint": "embeddings"}
    assert count_of(metrics, "requests_total", **asked, streaming="false", finish_reason="stop") == 1
    failed = {**asked, "status": "400", "error_type": "invalid_request_error"}
    assert count_of(metrics, "request_errors_total", **failed) == 1
