"""The first word of an answer: with the space before it where a text precedes, whatever the tokenizer's family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from deployments.api import TextCodec, create_app
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import MODEL, STOP, Client, ScriptedEngine, service_around
from tests.deployments.support.tokenizer_families import FAMILIES, tokenizer_of

FRANCE = "The capital of France is"
SENTENCEPIECE = ["llama-2", "mistral-v3", "zephyr", "phi-3"]
"""Families whose tokenizers put a space before a text's first word, and take it away."""


@dataclass
class Spoken:
    """A service whose model answers with the tokens of "Paris." as a text of its own."""

    client: Client
    engine: ScriptedEngine
    tokenizer: Any

    def post(self, path: str, **body: Any) -> Any:
        response = self.client.post(path, {"model": MODEL, "max_tokens": 50, **body})
        assert response.status_code == 200, response.text
        return response

    def completed(self, **body: Any) -> Any:
        return self.post("/v1/completions", **body).json()["choices"]

    @property
    def end(self) -> str:
        """The token that ends an answer."""
        return str(self.tokenizer.decode([STOP]))

    def expected(self) -> str:
        """What prompt and answer are as a text, beyond the prompt's text."""
        (prompt,) = {tuple(request.prompt_ids) for request in self.engine.requests}
        ids = self.engine.codec.encode("Paris.", add_special_tokens=False)
        before, whole = (
            self.tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, [*prompt, *ids])
        )
        assert whole.startswith(before)
        return str(whole[len(before) :])


@pytest.fixture(params=FAMILIES)
def spoken(request: pytest.FixtureRequest) -> Spoken:
    tokenizer = tokenizer_of(request.param)
    codec = TextCodec(tokenizer)
    engine = ScriptedEngine(codec, says="Paris.")
    service = service_around(engine, codec, Metrics(MODEL, "ingress-1"))
    return Spoken(Client(httpx.ASGITransport(create_app(service))), engine, tokenizer)


of_sentencepiece = pytest.mark.parametrize("spoken", SENTENCEPIECE, indirect=True)
PREFILLED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": FRANCE}]


def test_a_completion_is_the_text_that_the_prompt_grows_by(spoken: Spoken) -> None:
    choices = spoken.completed(prompt=FRANCE, n=2)
    assert [choice["text"] for choice in choices] == [spoken.expected()] * 2
    ids = spoken.engine.requests[0].prompt_ids
    assert spoken.completed(prompt=ids)[0]["text"] == spoken.expected()
    assert spoken.completed(prompt=[ids, ids])[1]["text"] == spoken.expected()
    sent = spoken.post("/v1/completions", prompt=FRANCE, stream=True).text
    assert "".join(chunk["choices"][0]["text"] for chunk in Chunks(sent)) == spoken.expected()


@of_sentencepiece
def test_echo_has_a_space_between_prompt_and_answer(spoken: Spoken) -> None:
    (choice,) = spoken.completed(prompt=FRANCE, echo=True, logprobs=0)
    assert choice["text"] == f"{FRANCE} Paris."
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    ends = [*offsets[1:], len(choice["text"])]
    said = [choice["text"][start:end] for start, end in zip(offsets, ends, strict=True)]
    num_prompt = len(spoken.engine.requests[0].prompt_ids)
    assert said[num_prompt:-1] == tokens[num_prompt:-1] and tokens[-1] == spoken.end and said[-1] == ""
    assert "".join(said) == choice["text"]


@of_sentencepiece
def test_stop_strings_may_begin_with_that_space(spoken: Spoken) -> None:
    for stop in (" Paris", " P", " "):
        (choice,) = spoken.completed(prompt=FRANCE, stop=stop)
        assert (choice["text"], choice["stop_reason"]) == ("", stop)
    (choice,) = spoken.completed(prompt=FRANCE, stop=[" Paris"], include_stop_str_in_output=True)
    assert choice["text"] == " Paris"
    (choice,) = spoken.completed(prompt=FRANCE, stop=["is Paris", "isParis", "France"])
    assert (choice["text"], choice["stop_reason"]) == (" Paris.", None)  # stop strings are searched in the answer


@of_sentencepiece
def test_where_no_text_precedes_the_answer_begins_with_its_first_letter(spoken: Spoken) -> None:
    begin = spoken.tokenizer.bos_token_id
    (choice,) = spoken.completed(prompt=[begin], logprobs=0, stop=[" Paris"])
    assert choice["text"] == "Paris."
    assert (
        "".join(choice["logprobs"]["tokens"]) == f"Paris.{spoken.end}"
        and choice["logprobs"]["text_offset"][0] == 0
    )
    spelled = zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True)
    assert all(choice["text"].startswith(token, at) for at, token in list(spelled)[:-1])


@of_sentencepiece
def test_special_tokens_that_are_shown_are_text_that_precedes(spoken: Spoken) -> None:
    begin = spoken.tokenizer.bos_token_id
    (choice,) = spoken.completed(prompt=[begin], skip_special_tokens=False)
    assert choice["text"] == " Paris."


@of_sentencepiece
def test_a_message_that_is_continued_has_the_space(spoken: Spoken) -> None:
    asked = {"messages": PREFILLED, "continue_final_message": True}
    (choice,) = spoken.post("/v1/chat/completions", **asked).json()["choices"]
    assert choice["message"]["content"] == " Paris." == spoken.expected()
    (choice,) = spoken.post("/v1/chat/completions", **asked, stop=" Paris").json()["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("", " Paris")
    answer = spoken.post("/v1/messages", messages=PREFILLED).json()
    assert answer["content"] == [{"type": "text", "text": " Paris."}]
    answer = spoken.post("/v1/messages", messages=PREFILLED, stop_sequences=[" Paris"]).json()
    assert answer["stop_sequence"] == " Paris"
    sent = spoken.post("/v1/messages", messages=PREFILLED, stream=True).text
    texts = [event["delta"].get("text", "") for event in Chunks(sent) if event["type"] == "content_block_delta"]
    assert "".join(texts) == " Paris."


@pytest.mark.parametrize("spoken", [*SENTENCEPIECE, "gemma", "qwen"], indirect=True)
def test_a_new_message_is_a_text_of_its_own(spoken: Spoken) -> None:
    """As `transformers` decodes it. So the template makes the generated tokens of it in a later turn."""
    ids = spoken.engine.codec.encode("Paris.", add_special_tokens=False)
    expected = spoken.tokenizer.decode(ids)
    turn: dict[str, Any] = {"messages": PREFILLED[:1]}
    (choice,) = spoken.post("/v1/chat/completions", **turn, logprobs=True).json()["choices"]
    assert choice["message"]["content"] == expected == "Paris."
    named = [at["token"] for at in choice["logprobs"]["content"]]
    assert "".join(named[:-1]) == expected and named[-1] == spoken.end
    answer = spoken.post("/v1/messages", **turn).json()
    assert answer["content"] == [{"type": "text", "text": expected}]
    answer = spoken.post("/v1/responses", input="Hi", max_tokens=None, max_output_tokens=50).json()
    assert answer["output"][-1]["content"][0]["text"] == expected
    nothing = [PREFILLED[0], {"role": "assistant", "content": ""}]
    (choice,) = spoken.post("/v1/chat/completions", messages=nothing, continue_final_message=True).json()[
        "choices"
    ]
    assert choice["message"]["content"] == expected


class Chunks(list[Any]):
    """The events of a stream."""

    def __init__(self, sent: str) -> None:
        lines = (line.removeprefix("data: ") for line in sent.splitlines() if line.startswith("data: "))
        super().__init__(json.loads(line) for line in lines if line != "[DONE]")
