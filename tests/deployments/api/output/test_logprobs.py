"""How log-probabilities are spelled, with tokenizers of both kinds."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from deployments.api.output import response_encoder
from deployments.api.output.logprobs import (
    OutputOffsets,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from deployments.api.served.text_codec import TextCodec
from engine.values.logprobs import TokenLogprobs
from tests.deployments.support.scripted_api import Client

LETTERS = ["▁", "t", "h", "e", "a", "▁t", "▁th", "▁the", "th", "the", "▁a"]


@pytest.fixture(scope="module")
def sentencepiece() -> TextCodec:
    """A tokenizer of Llama 2's kind: words bear their space, and what it has no letters for is bytes."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("t", "h"), ("th", "e"), ("▁", "a")]
    ids = {token: number for number, token in enumerate(vocabulary)}
    inner = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return TextCodec(cast(Any, PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")))


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return codec.encode(text, add_special_tokens=False)


# --- the client's types ----------------------------------------------------------------------------------------


def stream_of(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = client.post(path, body | {"stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]


def test_answers_match_the_types_of_the_client(client: Client) -> None:
    """Validated, which the client itself does not do."""
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
    chat |= {"logprobs": True, "top_logprobs": 2}
    answer = ChatCompletion.model_validate(client.post("/v1/chat/completions", chat).json())
    at_once = answer.choices[0].logprobs
    assert at_once is not None and at_once.content is not None and len(at_once.content) == 6
    chunks = [
        ChatCompletionChunk.model_validate(chunk) for chunk in stream_of(client, "/v1/chat/completions", chat)
    ]
    streamed = [t for c in chunks for at in c.choices if at.logprobs for t in at.logprobs.content or ()]
    assert [t.model_dump() for t in streamed] == [t.model_dump() for t in at_once.content]

    text = {"model": "demo", "prompt": "Hi", "max_tokens": 6, "logprobs": 2}
    whole = Completion.model_validate(client.post("/v1/completions", text).json()).choices[0].logprobs
    assert whole is not None
    chosen = [choice for chunk in stream_of(client, "/v1/completions", text) for choice in chunk["choices"]]
    parts = [Logprobs.model_validate(choice["logprobs"]) for choice in chosen if choice["logprobs"]]
    for name, value in whole.model_dump().items():
        assert value == [item for part in parts for item in getattr(part, name)]


# --- tokens ----------------------------------------------------------------------------------------------------


def test_a_word_keeps_the_space_it_has_within_a_text(sentencepiece: TextCodec) -> None:
    with_space, without = sentencepiece.encode("the")[0], ids_of(sentencepiece, "athe")[-1]
    assert with_space != without
    assert sentencepiece.token_text(with_space) == (" the", tuple(b" the"))
    assert sentencepiece.token_text(without) == ("the", tuple(b"the"))
    assert sentencepiece.token_key(with_space) == " the"


def test_special_tokens_read_as_they_are_written(sentencepiece: TextCodec, codec: TextCodec) -> None:
    assert sentencepiece.token_text(1) == ("<s>", tuple(b"<s>")) and sentencepiece.is_special(1)
    (end,) = ids_of(codec, "<|im_end|>")
    assert codec.token_key(end) == "<|im_end|>" and codec.is_special(end)
    assert not codec.is_special(ids_of(codec, "the")[0])


def test_parts_of_characters_are_bytes(sentencepiece: TextCodec, codec: TextCodec) -> None:
    for tokenizer in (sentencepiece, codec):
        ids = ids_of(tokenizer, "€")
        assert len(ids) > 1
        assert b"".join(bytes(tokenizer.token_text(token)[1]) for token in ids).decode().strip() == "€"
    assert "bytes:\\xe2" in [codec.token_key(token) for token in ids_of(codec, "€")]


# --- where they are in the text --------------------------------------------------------------------------------


def pieces(codec: TextCodec, ids: list[int], text: str) -> list[str]:
    """The text cut where tokens begin."""
    offsets = prompt_offsets(codec, ids, text)
    return [text[start:end] for start, end in zip(offsets, [*offsets[1:], len(text)], strict=True)]


def test_offsets_cut_a_prompt_where_its_tokens_begin(codec: TextCodec) -> None:
    text = "the café costs 5 € or 🙂 less"
    ids = ids_of(codec, text)
    cut = pieces(codec, ids, text)
    assert "".join(cut) == text
    whole = [(codec.token_text(token)[0], piece) for token, piece in zip(ids, cut, strict=True)]
    assert [piece for spelled, piece in whole if "\ufffd" not in spelled] == [
        spelled for spelled, _ in whole if "\ufffd" not in spelled
    ]


def test_a_text_that_begins_with_a_word_has_no_space_there(sentencepiece: TextCodec) -> None:
    ids = ids_of(sentencepiece, "the athe the")
    assert pieces(sentencepiece, ids, "the athe the") == ["the", " a", "the", " the"]


def test_tokens_that_the_tokenizer_added_have_no_place_in_the_text(sentencepiece: TextCodec) -> None:
    ids = [1, *ids_of(sentencepiece, "the a")]
    assert prompt_offsets(sentencepiece, ids, "the a") == [0, 0, 3]
    assert prompt_offsets(sentencepiece, ids, "<s>the a") == [0, 3, 6]  # written, or decoded from ids


def test_offsets_never_leave_a_text_that_the_tokenizer_changed(codec: TextCodec) -> None:
    ids = ids_of(codec, "something else altogether, and longer")
    offsets = prompt_offsets(codec, ids, "short")
    assert offsets == sorted(offsets) and offsets[-1] <= len("short")


def test_offsets_of_output_continue_where_the_prompt_ends(codec: TextCodec) -> None:
    (end,) = ids_of(codec, "<|im_end|>")
    offsets = OutputOffsets(codec, 10)
    before, after = ([TokenLogprobs(token, -0.5) for token in ids_of(codec, text)] for text in ("é a", " b"))
    assert offsets.add("é a", before)[0] == 10
    assert offsets.add("", [TokenLogprobs(end, -0.5)]) == [10 + len("é a")]  # it is no part of the text
    assert offsets.add(" b", after)[0] == 10 + len("é a")
    assert offsets.add("cut off", []) == [] and offsets.add("", [TokenLogprobs(end, -0.5)]) == [22]
    parts = TextOffsets(3)
    assert [parts.add(part) for part in (b"\xf0", b"\x9f\x98", b"\x80", b"a", b"\xa0", b"b")] == [3, 3, 3, 4, 5, 6]


# --- the formats -----------------------------------------------------------------------------------------------


def test_the_likelier_one_of_tokens_with_the_same_text_counts(codec: TextCodec) -> None:
    """A harness that asks for one alternative compares it with the token's own: it must not be overwritten."""
    a, b = ids_of(codec, "a")[0], ids_of(codec, "b")[0]
    (top,) = completion_logprobs(codec, [TokenLogprobs(a, -3.0, ((a, -0.1),))], 1, [0])["top_logprobs"]
    assert top == {"a": -0.1}
    (top,) = completion_logprobs(codec, [TokenLogprobs(b, -3.0, ((a, -0.1),))], 1, [0])["top_logprobs"]
    assert top == {"a": -0.1, "b": -3.0}


def test_a_prompt_s_first_token_has_no_logprob(codec: TextCodec) -> None:
    ids = ids_of(codec, "the a")
    scores = [TokenLogprobs(token, -0.5, ((token, -0.5),), 1) for token in ids[1:]]
    echoed = echo_logprobs(codec, ids, "the a", scores, 1)
    assert {name: len(values) for name, values in echoed.items()} == dict.fromkeys(echoed, len(ids))
    assert "".join(echoed["tokens"]) == "the a"
    assert echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
    assert prompt_logprobs(codec, scores, 1)[0] is None
    assert echo_logprobs(codec, ids[:1], "the", [], 1)["token_logprobs"] == [None]


def test_prompt_logprobs_are_by_token_id_with_ranks(codec: TextCodec) -> None:
    ids = [10, 11, 12]
    top = ((ids[0], -0.25), (ids[1], -1.0))
    unlikely, likely = TokenLogprobs(ids[2], -5.0, top, 17), TokenLogprobs(ids[1], -1.0, top, 2)
    _, first, second = prompt_logprobs(codec, [unlikely, likely], 2)
    assert first == {
        str(ids[2]): {"logprob": -5.0, "rank": 17, "decoded_token": codec.token_text(ids[2])[0]},
        str(ids[0]): {"logprob": -0.25, "rank": 1, "decoded_token": codec.token_text(ids[0])[0]},
        str(ids[1]): {"logprob": -1.0, "rank": 2, "decoded_token": codec.token_text(ids[1])[0]},
    }
    assert list(second) == [str(ids[1]), str(ids[0])]


def test_a_log_probability_that_json_cannot_express_is_the_lowest_one(codec: TextCodec) -> None:
    impossible = TokenLogprobs(5, -math.inf, ((6, math.nan),), 9)
    assert [at["logprob"] for at in prompt_logprobs(codec, [impossible], 1)[1].values()] == [-9999.0] * 2
    assert completion_logprobs(codec, [impossible], 1, [0])["token_logprobs"] == [-9999.0]
    content = chat_logprobs(codec, [TokenLogprobs(5, -math.inf, ((6, -1.0),))], 1)["content"]
    assert content[0]["logprob"] == -9999.0 and content[0]["top_logprobs"][0]["logprob"] == -1.0


def test_a_long_list_is_encoded_in_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step holds the interpreter's lock, so that no other thread goes on."""
    steps: list[int] = []

    def encode(values: Any) -> bytes:
        steps.append(len(values))
        return json.dumps(values).encode()

    monkeypatch.setattr(response_encoder, "encode_json", encode)
    for values in ([], [{"a": 1}], [[number, "x"] for number in range(3 * response_encoder.PIECE + 1)]):
        assert json.loads(b"".join(response_encoder.encoded_list(values).pieces)) == values
    assert max(steps) == response_encoder.PIECE
    spelled = response_encoder.encoded_list(range(600), lambda piece: [-number for number in piece])
    assert json.loads(b"".join(spelled.pieces)) == [-number for number in range(600)]


def test_an_answer_encoded_in_pieces_is_never_joined() -> None:
    long, longer = response_encoder.Pieces([b"[1,", b"2]"]), response_encoder.Pieces([b'{"a":', b"3}"])
    answer = {"\0": "\0", "deep": [{"long": long}, {"longer": longer, "after": long}], "end": None}
    pieces = response_encoder.in_pieces(answer)
    assert [piece for piece in pieces if piece in (*long.pieces, *longer.pieces)] == [
        b"[1,", b"2]", b'{"a":', b"3}", b"[1,", b"2]"
    ]  # fmt: skip
    spelled = {"\0": "\0", "deep": [{"long": [1, 2]}, {"longer": {"a": 3}, "after": [1, 2]}], "end": None}
    assert json.loads(b"".join(pieces)) == spelled
    choices = ({"index": index, "long": long} for index in range(2))
    whole = response_encoder.encode_whole({"id": "x", "longer": longer}, choices, {"usage": {"total_tokens": 1}})
    assert json.loads(b"".join(whole)) == {
        "id": "x", "longer": {"a": 3}, "usage": {"total_tokens": 1},
        "choices": [{"index": 0, "long": [1, 2]}, {"index": 1, "long": [1, 2]}],
    }  # fmt: skip
