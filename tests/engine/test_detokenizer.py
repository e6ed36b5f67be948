"""Streamed text equals decoded text, whatever the cuts; stop strings are found across token borders."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import TextStream
from engine.loading.model_directory import resolve_model
from engine.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("demo"))


BROKEN = range(97, 259)
"""Tokens of the embedded model that are single bytes beyond ASCII, most of which continue characters."""


class Counting:
    """Records the largest number of tokens decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.most = tokenizer, 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.most = max(self.most, len(token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def stream(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...] = ()
) -> tuple[str, TextStream]:
    text, at = TextStream(tokenizer, stop), 0
    shown = []
    for size in [*sizes, len(ids)]:
        shown.append(text.push(ids[at : at + size]).text)
        at += size
    return "".join(shown) + text.finish(), text


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
    assert streamed.replace("\ufffd", "") == whole.replace("\ufffd", "")


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
    assert streamed.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_bytes_that_never_become_a_character_cost_no_more_the_longer_they_are(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    text = TextStream(counting)  # type: ignore[arg-type]
    shown = "".join(text.push([BROKEN[0]]).text for _ in range(500))
    assert shown + text.finish() == "\ufffd" * 500
    assert counting.most < 50


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    text = TextStream(tokenizer)
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
        assert shown == text
        return
    # The stream stops at the token that completes a stop string: the first to be completed wins.
    complete = tokenizer.decode(ids[: made.num_tokens])
    cut = min(complete.find(string) for string in stop if string in complete)
    assert shown == text[:cut]
    assert not any(string in tokenizer.decode(ids[: made.num_tokens - 1]) for string in stop)


def test_what_may_begin_a_stop_string_is_held_until_it_does_not(tokenizer: Tokenizer) -> None:
    text = TextStream(tokenizer, ["END"])
    first = text.push(tokenizer.encode("the E", add_special_tokens=False))
    assert first.text == "the "
    assert text.push(tokenizer.encode("x", add_special_tokens=False)).text == "Ex"
    assert text.finish() == ""


def test_min_tokens_lets_stop_strings_pass(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b a b a b", add_special_tokens=False)
    text = TextStream(tokenizer, ["b"], min_tokens=4)
    assert "".join(text.push([token]).text for token in ids).count("b") >= 1
    assert text.stopped
