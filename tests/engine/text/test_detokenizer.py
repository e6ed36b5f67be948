"""Streamed text equals decoded text, whatever the cuts; stop strings are found across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.model_files.model_directory import resolve_model
from engine.text.detokenizer import ByteDecoder, Detokenizer, TextStream, TokenDecoder, WindowDecoder
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.count_calls import count_calls
from tests.support.examples import examples

BROKEN = range(97, 259)
"""Tokens of the embedded model that are single bytes beyond ASCII, most of which continue characters."""


class Opaque:
    """A tokenizer whose tokens' bytes cannot be read. Records the largest number of tokens decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.most = tokenizer, 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.most = max(self.most, len(token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


DEMO = load_tokenizer(resolve_model("demo"))
BYTE_LEVEL = Detokenizer(DEMO)


def sentencepiece() -> Tokenizer:
    """A tokenizer of Llama 2's kind: words bear their space, and what it has no letters for is bytes."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab漢", "▁a", "▁b"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    merges = [("▁", "a"), ("▁", "b")]
    inner = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return cast(Tokenizer, PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))


@pytest.fixture(scope="module", params=["byte-level", "opaque", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "sentencepiece":
        return sentencepiece()
    return DEMO if request.param == "byte-level" else cast(Tokenizer, Opaque(DEMO))


def stream(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...] = ()
) -> tuple[str, TextStream]:
    text, at = TextStream(Detokenizer(tokenizer).decoder(), stop), 0
    shown = []
    for size in [*sizes, len(ids)]:
        shown.append(text.push(ids[at : at + size]).text)
        at += size
    return "".join(shown) + text.finish(), text


def has_in_order(text: str, chars: str) -> bool:
    """Whether the text has all these characters, in their order, and perhaps others between them."""
    rest = iter(text)
    return all(char in rest for char in chars)


texts = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé漢😀👩‍👩‍👧 \n")), max_size=60)


@settings(deadline=None)
@given(text=texts, sizes=st.lists(st.integers(0, 5), max_size=30))
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed, _ = stream(tokenizer, ids, sizes)
    assert streamed == tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=40), sizes=st.lists(st.integers(0, 3), max_size=30))
def test_broken_utf8_from_a_model_never_raises_and_loses_no_readable_text(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    streamed, _ = stream(tokenizer, ids, sizes)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert has_in_order(streamed, whole.replace("\ufffd", ""))


@settings(deadline=None, max_examples=30)
@given(
    before=st.lists(st.integers(0, 300), max_size=10),
    broken=st.lists(st.sampled_from(BROKEN), min_size=40, max_size=80),
    text=texts,
    size=st.integers(1, 40),
)
def test_text_after_a_long_run_of_broken_bytes_is_not_lost(
    tokenizer: Tokenizer, before: list[int], broken: list[int], text: str, size: int
) -> None:
    ids = [*before, *broken, *tokenizer.encode(text, add_special_tokens=False)]
    streamed, _ = stream(tokenizer, ids, [size] * (len(ids) // size))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert has_in_order(streamed, whole.replace("\ufffd", ""))


def test_bytes_that_never_become_a_character_cost_no_more_the_longer_they_are() -> None:
    counting = Opaque(DEMO)
    text = TextStream(Detokenizer(cast(Tokenizer, counting)).decoder())
    shown = "".join(text.push([BROKEN[0]]).text for _ in range(500))
    assert shown + text.finish() == "\ufffd" * 500
    assert counting.most < 50


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 4200), max_size=40),
    sizes=st.lists(st.integers(0, 3), max_size=30),
    kept=st.sets(st.sampled_from(["<|im_start|>", "<|im_end|>", "unknown"])),
)
def test_a_byte_level_text_is_exact_whatever_the_model_generates(
    ids: list[int], sizes: list[int], kept: set[str]
) -> None:
    """Broken characters, special tokens and ids without a token included; only the kept special tokens show."""
    decoder = BYTE_LEVEL.decoder(kept)
    assert isinstance(decoder, ByteDecoder)
    shown, at = "", 0
    for size in [*sizes, len(ids)]:
        shown += decoder.push(ids[at : at + size])
        at += size
    hidden = {token_id for text, token_id in BYTE_LEVEL.specials.items() if text not in kept}
    assert shown + decoder.rest() == DEMO.decode([token_id for token_id in ids if token_id not in hidden])


def test_characters_in_bytes_come_one_by_one(tokenizer: Tokenizer) -> None:
    """Some tokenizers decode a run of bytes to nothing readable until its last character is complete."""
    ids = tokenizer.encode("😀😀😀", add_special_tokens=False)
    shown = [stream(tokenizer, ids[:count], [1] * count)[0] for count in range(len(ids) + 1)]
    assert {text.replace("\ufffd", "") for text in shown} == {"", "😀", "😀😀", "😀😀😀"}


def test_a_tokenizer_that_does_more_than_to_join_bytes_is_asked_for_texts() -> None:

    class CleanedUp(Opaque):
        backend_tokenizer = DEMO.backend_tokenizer  # type: ignore[attr-defined]

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens).replace(" .", ".")

    assert isinstance(Detokenizer(cast(Tokenizer, CleanedUp(DEMO))).decoder(), WindowDecoder)
    assert isinstance(Detokenizer(cast(Tokenizer, Opaque(DEMO))).decoder(), WindowDecoder)
    assert isinstance(Detokenizer(sentencepiece()).decoder(), ByteDecoder)


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    text = TextStream(Detokenizer(tokenizer).decoder())
    assert [text.push([token]).text for token in ids] == [""] * (len(ids) - 1) + ["😀"]


@settings(deadline=None)
@given(
    text=st.text("ab ", max_size=40), stop=st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3)
)
def test_the_first_stop_string_cuts_the_text(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(ids)
    shown, made = stream(tokenizer, ids, [1] * len(ids), tuple(stop))
    found = [at for string in stop if (at := text.find(string)) >= 0]
    assert made.stopped == bool(found)
    if not found:
        assert shown == text and made.stop_string is None
        return
    # The stream stops at the token that completes a stop string: the first to be completed wins.
    complete = tokenizer.decode(ids[: made.num_tokens])
    cut = min(complete.find(string) for string in stop if string in complete)
    assert shown == text[:cut]
    assert made.stop_string == max((string for string in stop if complete.startswith(string, cut)), key=len)
    assert not any(string in tokenizer.decode(ids[: made.num_tokens - 1]) for string in stop)


class Letters:
    """A decoder whose tokens are texts of any length."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token] for token in token_ids)

    def rest(self) -> str:
        return ""


def searched(pieces: Sequence[str], stop: Sequence[str], min_tokens: int) -> list[tuple[str, bool]]:
    """What each token shows, by a search of all that is held, and whether the text ends there."""
    deltas, held = [], ""
    for count, piece in enumerate(pieces, 1):
        if count < min_tokens:
            deltas.append((piece, False))
            continue
        held += piece
        if found := [held.find(string) for string in stop if string in held]:
            return [*deltas, (held[: min(found)], True)]
        ends = [held[at:] for at in range(len(held)) if any(string.startswith(held[at:]) for string in stop)]
        shown = len(held) - len(ends[0] if ends else "")
        deltas.append((held[:shown], False))
        held = held[shown:]
    return [*deltas, (held, False)]


@settings(deadline=None, max_examples=examples(500))
@given(
    pieces=st.lists(st.text("ab漢", max_size=6), max_size=30),
    stop=st.lists(st.text("ab漢", min_size=1, max_size=9), min_size=1, max_size=8),
    min_tokens=st.integers(0, 5),
)
def test_every_token_shows_the_text_that_a_search_of_the_whole_would_show(
    pieces: list[str], stop: list[str], min_tokens: int
) -> None:
    """Whatever the tokens' borders: nothing that begins a stop string is shown, and nothing else is held."""
    text = TextStream(cast(TokenDecoder, Letters(pieces)), stop, min_tokens=min_tokens)
    deltas = []
    for token in range(len(pieces)):
        delta = text.push([token])
        deltas.append((delta.text, delta.stopped))
        if delta.stopped:
            break
    else:
        deltas.append((text.finish(), False))
    assert deltas == searched(pieces, stop, min_tokens)


@pytest.mark.parametrize(
    ("stop", "piece"),
    [
        (["a" * 255 + "b", *("x" * 256 for _ in range(7))], "aaaa"),
        (["a" * 255 + "b", *("a" * (120 + at) + "x" * (136 - at) for at in range(7))], "aaaa"),
        (["b" + "a" * 255, *("a" * 32 * at + "b" for at in range(1, 8))], "aaaa"),
        (["ab" * 127 + "ax", *("ab" * at + "x" for at in range(100, 107))], "abab"),
        ([chr(97 + at) + "y" * 255 for at in range(8)], "ahgc"),
        (["END"], "abcd"),
    ],
    ids=["one holds", "all hold", "short after long", "two letters", "first letters", "one"],
)
def test_stop_strings_take_few_steps_a_token_however_long_the_text_is(stop: list[str], piece: str) -> None:
    """At the limits of their number and length. What they take in time, `benchmarks.sampling` measures."""
    text = TextStream(cast(TokenDecoder, Letters([piece])), stop)

    def push_many() -> None:
        for _ in range(1000):
            text.push([0])

    push_many()  # as much as may be held is held now
    steps = [count_calls(push_many) for _ in range(5)]
    assert not text.stopped
    assert max(steps) <= 1000 * 60 and max(steps) - min(steps) <= 300


def test_text_that_may_begin_a_stop_string_is_held_until_it_cannot() -> None:
    text = TextStream(BYTE_LEVEL.decoder(), ["END"])
    first = text.push(DEMO.encode("the E", add_special_tokens=False))
    assert first.text == "the "
    assert text.push(DEMO.encode("x", add_special_tokens=False)).text == "Ex"
    assert text.finish() == ""


def test_min_tokens_lets_stop_strings_pass() -> None:
    ids = DEMO.encode("a b a b a b", add_special_tokens=False)
    text = TextStream(BYTE_LEVEL.decoder(), ["b"], min_tokens=4)
    assert "".join(text.push([token]).text for token in ids).count("b") >= 1
    assert text.stopped
