"""What answers tell beside their text, where vLLM has it: why they ended, what computed them, tokens by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from engine.model_files.model_directory import demo_model_path
from engine.settings.generation_defaults import generation_defaults
from tests.deployments.support.scripted_api import STOP, Client, ScriptedEngine

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "hi", "max_tokens": 60}
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
SAID = "The quick brown fox jumps over the lazy dog."
Changed = Callable[..., Client]


@pytest.fixture
def changed(service: ApiService) -> Changed:
    """A client of the API with other facts about its model."""

    def make(**card: Any) -> Client:
        served = service.models["demo"]
        models = {"demo": replace(served, card=replace(served.card, **card))}
        return Client(httpx.ASGITransport(create_app(replace(service, models=models))))

    return make


def events(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in client.post(path, body | {"stream": True}).text.split("\n\n")]
    return [json.loads(event) for event in data if event.startswith("{")]


def told(client: Client, path: str, body: dict[str, Any]) -> tuple[str, str, Any]:
    """The text, why it ended, and by what: the same whole and streamed."""
    choice = client.post(path, body).json()["choices"][0]
    whole = (choice.get("text") or choice.get("message", {}).get("content") or "", *ends(choice))
    chunks = [event["choices"][0] for event in events(client, path, body)]
    text = "".join(chunk.get("text") or chunk.get("delta", {}).get("content") or "" for chunk in chunks)
    assert (text, *ends(chunks[-1])) == whole
    return whole


def ends(choice: dict[str, Any]) -> tuple[str, Any]:
    return choice["finish_reason"], choice["stop_reason"]


@BOTH
def test_a_choice_reports_what_ended_it(changed: Changed, path: str, body: dict[str, Any]) -> None:
    """A stop string, a stop token that was asked for, nothing for the model's own end, as in vLLM."""
    client = changed(eos_token_ids=frozenset({STOP}))
    assert told(client, path, body) == (SAID, "stop", None)
    assert told(client, path, body | {"stop": ["lazy", " fox"]}) == ("The quick brown", "stop", " fox")
    assert told(client, path, body | {"max_tokens": 2})[1:] == ("length", None)
    assert told(client, path, body | {"stop_token_ids": [STOP]}) == (SAID, "stop", None)
    assert told(client, path, body | {"stop_token_ids": [STOP], "ignore_eos": True}) == (SAID, "stop", STOP)
    assert told(changed(eos_token_ids=frozenset({7})), path, body | {"stop_token_ids": [STOP]})[2] == STOP


@BOTH
def test_a_stop_string_may_be_part_of_the_answer(client: Client, path: str, body: dict[str, Any]) -> None:
    included = body | {"include_stop_str_in_output": True}
    assert told(client, path, included | {"stop": " fox"}) == ("The quick brown fox", "stop", " fox")
    assert told(client, path, included) == (SAID, "stop", None)
    with_specials = included | {"skip_special_tokens": False}
    assert told(client, path, with_specials) == (SAID + "<|im_end|>", "stop", None)
    assert told(client, path, body | {"skip_special_tokens": False}) == (SAID, "stop", None)


@BOTH
def test_special_tokens_are_text_if_asked(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    engine.says = "a<|im_start|>b"
    assert told(client, path, body)[0] == "ab"
    for spaces in (True, False):  # no tokenizer that is supported puts spaces there
        fields = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert told(client, path, body | fields)[0] == engine.says


@BOTH
def test_all_answers_and_chunks_have_the_systems_fingerprint(
    changed: Changed, path: str, body: dict[str, Any]
) -> None:
    client = changed(fingerprint="fp_12")
    assert client.post(path, body).json()["system_fingerprint"] == "fp_12"
    usage = {"stream_options": {"include_usage": True}}
    assert {event["system_fingerprint"] for event in events(client, path, body | usage)} == {"fp_12"}


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_a_chats_stream_begins_with_its_prompts_ids(
    client: Client, engine: ScriptedEngine, options: dict[str, bool]
) -> None:
    """Beside the choices, as in vLLM."""
    streamed = events(client, "/v1/chat/completions", CHAT | {"return_token_ids": True, "stream_options": options})
    assert streamed[0]["prompt_token_ids"] == engine.requests[0].prompt_ids
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert ("usage" in streamed[0]) == bool(options)
    assert not any("prompt_token_ids" in event for event in streamed[1:])
    assert not any("prompt_token_ids" in choice for event in streamed for choice in event["choices"])


@BOTH
def test_tokens_may_be_named_by_their_ids(client: Client, path: str, body: dict[str, Any]) -> None:
    is_chat = "messages" in body
    asked = {"logprobs": True, "top_logprobs": 1} if is_chat else {"logprobs": 1, "echo": True}
    ids, body = {"return_token_ids": True}, body | asked
    choice = client.post(path, body | ids | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    expected = [f"token_id:{token}" for token in [*choice.get("prompt_token_ids", []), *choice["token_ids"]]]
    plain = client.post(path, body).json()["choices"][0]["logprobs"]
    if is_chat:
        content = choice["logprobs"]["content"]
        assert [at["token"] for at in content] == expected
        assert [at["bytes"] for at in content] == [at["bytes"] for at in plain["content"]]
        assert {at["top_logprobs"][0]["token"] for at in content} == {"token_id:100"}
    else:
        assert choice["logprobs"]["tokens"] == expected
        assert choice["logprobs"]["text_offset"] == plain["text_offset"]
        assert choice["logprobs"]["top_logprobs"][-1].keys() == {expected[-1], "token_id:100"}


# --- prompts that are cut ---------------------------------------------------------------------------------------


@BOTH
def test_the_end_or_the_beginning_of_a_longer_prompt_is_kept(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    for fields in ({}, {"truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": 4, "truncation_side": "right"}):
        assert client.post(path, body | change(body, "one two three four five six") | fields).status_code == 200
    whole, end, beginning = (request.prompt_ids for request in engine.requests)
    assert (end, beginning) == (whole[-4:], whole[:4])
    client.post(path, body | {"truncate_prompt_tokens": 500})
    assert len(engine.requests[-1].prompt_ids) < 500


@BOTH
def test_as_many_tokens_are_kept_as_fit(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    long = body | change(body, "word " * 2000)
    assert client.post(path, long).json()["error"]["code"] == "context_length_exceeded"
    response = client.post(path, long | {"truncate_prompt_tokens": -1, "echo": None})
    assert response.status_code == 200, response.text
    assert len(engine.requests[0].prompt_ids) == 512 - 60
    error = client.post(path, long | {"truncate_prompt_tokens": 600}).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "[1, 512]" in error["message"]
    assert client.post(path, body | {"truncation_side": "up"}).json()["error"]["param"] == "truncation_side"


def test_the_kept_part_of_a_cut_prompt_is_echoed(client: Client, engine: ScriptedEngine) -> None:
    body = COMPLETION | {
        "prompt": "one two three four",
        "echo": True,
        "max_tokens": 0,
        "truncate_prompt_tokens": 2,
    }
    text = client.post("/v1/completions", body).json()["choices"][0]["text"]
    assert text and "one two three four".endswith(text) and text != "one two three four"


def change(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {"prompt": text} if "prompt" in body else {"messages": [{"role": "user", "content": text}]}


# --- what a model's makers recommend ----------------------------------------------------------------------------

QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@BOTH
def test_requests_without_parameters_are_sampled_as_recommended(
    changed: Changed, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    client = changed(sampling_defaults=QWEN)
    for fields in ({}, {"temperature": None, "top_k": -1, "top_p": 0.5}, {"use_beam_search": True}):
        client.post(path, body | fields)
    sampled = [(at.temperature, at.top_p, at.top_k) for at in (request.sampling for request in engine.requests)]
    assert sampled == [(0.6, 0.95, 20), (0.6, 0.5, 0), (1.0, 1.0, 0)]


def test_recommended_lengths_apply_only_to_chat(changed: Changed, engine: ScriptedEngine) -> None:
    client = changed(sampling_defaults={"max_tokens": 30})
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        for asked in (None, 40):
            client.post(path, body | {"max_tokens": asked})
    assert [request.sampling.max_tokens for request in engine.requests] == [30, 40, 16, 40]


def test_recommendations_come_from_the_models_files_or_from_the_setting(tmp_path: Any) -> None:
    file = tmp_path / "generation_config.json"
    assert generation_defaults("model", tmp_path) == generation_defaults("model", demo_model_path()) == {}
    file.write_text(
        json.dumps(QWEN | {"do_sample": True, "eos_token_id": [1], "max_new_tokens": 99, "min_p": None})
    )
    assert generation_defaults("model", tmp_path) == QWEN | {"max_tokens": 99}
    assert generation_defaults("none", tmp_path) == {}
    assert generation_defaults({"top_k": -1}, tmp_path) == {"top_k": 0}
    for wrong, message in (({"top_q": 1}, "has top_q; known are temperature"), ({"top_p": 7}, "top_p must be in")):
        with pytest.raises(ValueError, match=message):
            generation_defaults(wrong, tmp_path)
    file.write_text('{"temperature": -3}')
    with pytest.raises(ValueError, match=r"generation_config\.json has a wrong value: temperature must be in"):
        generation_defaults("model", tmp_path)


# --- the tokenizer ----------------------------------------------------------------------------------------------


def test_the_tokenizers_configuration_can_be_read_unless_it_is_turned_off(
    service: ApiService, client: Client
) -> None:
    """lm-eval looks for these names."""
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["pad_token"] == "<|endoftext|>"
    assert "<|im_start|>" in info["chat_template"] and info["tokenizer_class"] == "TokenizersBackend"
    assert str(demo_model_path()) not in json.dumps(info)
    assert client.get("/tokenizer_info?model=other").status_code == 404
    off = Client(httpx.ASGITransport(create_app(replace(service, shows_tokenizer=False))))
    assert off.get("/tokenizer_info").status_code == 404


@BOTH
def test_one_request_may_have_128_choices(client: Client, path: str, body: dict[str, Any]) -> None:
    assert len(client.post(path, body | {"n": 128, "max_tokens": 1}).json()["choices"]) == 128
