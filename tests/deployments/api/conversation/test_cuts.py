"""Cuts: pieces' token ids are those of the whole text, and tokenizers that would give others are not cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from deployments.api.conversation import cuts
from deployments.api.conversation.control_tokens import Spelled, control_tokens
from deployments.api.conversation.cuts import cut, cut_pattern
from deployments.api.served.text_codec import TextCodec
from tests.deployments.support.random_conversations import RandomConversations
from tests.deployments.support.tokenizer_families import FAMILIES, tokenizer_of
from tests.support.examples import examples

NUM_CONVERSATIONS = examples(250)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_are_encoded_as_if_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of them: begun, grown by turns, changed, with texts that look like special tokens.

    They are cut wherever they may be, and the cache is small, so that much is forgotten.
    """
    monkeypatch.setattr(cuts, "MIN_PIECE_CHARS", 1)
    tokenizer = tokenizer_of(family)
    control = Spelled(control_tokens(tokenizer, FAMILIES[family].template, ()).id_of)
    codec, uncut = TextCodec(tokenizer, max_cache_bytes=200_000), TextCodec(tokenizer, max_cache_bytes=0)
    draw = RandomConversations(random.Random(7), [*FAMILIES[family].special, *FAMILIES[family].also_added])
    num_hits = 0
    for messages in draw.take(NUM_CONVERSATIONS):
        texts = codec.render_chat(messages)
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        num_hits += texts.num_new_chars < len(whole) // 2
        ids = texts.encode()
        if any(control.find(message["content"]) for message in messages):
            # A user's control tokens are encoded apart, so the text around them is not encoded whole.
            assert ids == uncut.encode_chat(messages), messages
        else:
            assert ids == tokenizer.encode(whole, add_special_tokens=False), messages
    assert num_hits > NUM_CONVERSATIONS // 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pieces_of_a_conversation_are_those_of_its_next_turn(family: str) -> None:
    tokenizer = tokenizer_of(family)
    pattern = cut_pattern(tokenizer.backend_tokenizer, FAMILIES[family].template)
    assert pattern is not None
    turns = [{"role": role, "content": f"{role} says {'much ' * 30}"} for role in ("user", "assistant") * 5]

    def pieces(num_turns: int) -> list[str]:
        whole = tokenizer.apply_chat_template(turns[:num_turns], tokenize=False)
        found = cut(whole, pattern)
        assert "".join(found) == whole and all(len(piece) >= cuts.MIN_PIECE_CHARS for piece in found[:-1])
        return found

    for num_turns in range(1, 10):
        earlier, later = pieces(num_turns), pieces(num_turns + 1)
        assert later[: len(earlier) - 1] == earlier[:-1]
    assert len(pieces(10)) >= 5


def characters(added: list[AddedToken], **parts: Any) -> Tokenizer:
    """A tokenizer with a token for each character, and added tokens."""
    alphabet = {chr(code): code for code in range(32, 127)} | {"▁": 127}
    tokenizer = Tokenizer(parts.pop("model", models.BPE(alphabet, [])))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(added)
    return tokenizer


def token(text: str, **options: bool) -> AddedToken:
    return AddedToken(text, normalized=options.pop("normalized", False), special=True, **options)


UNSAFE: dict[str, tuple[Tokenizer, str]] = {
    "it takes the space before it": (characters([token("<t>", lstrip=True)]), "a  <t>b"),
    "it is found only between words": (characters([token("<t>", single_word=True)]), "a<t>"),
    "it is found after normalizing": (
        characters([token("<t>", normalized=True)], normalizer=normalizers.Prepend("▁")),
        "a<t>b",
    ),
    "another reaches into it": (characters([token("<t>"), token("a<")]), "a<t>b"),
    "another that begins with it takes the space": (
        characters([token("<t>"), token("<t>b", lstrip=True)]),
        "a <t>b",
    ),
    "it overlaps itself": (characters([token("<t><")]), "<t><t><"),
    "the one before wants a word's end": (characters([token("<t", single_word=True), token("t>")]), "<tt>"),
}


@pytest.mark.parametrize("why", UNSAFE)
def test_no_text_is_cut_before_a_token_where_that_would_change_the_ids(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text has a token before which a cut does change them."""
    tokenizer, text = UNSAFE[why]

    def ids(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False).ids)

    monkeypatch.setattr(cuts, "MIN_PIECE_CHARS", 1)
    pattern = cut_pattern(tokenizer, "")
    pieces = cut(text, pattern) if pattern else [text]
    assert [number for piece in pieces for number in ids(piece)] == ids(text)
    tokens = tuple(added.content for added in tokenizer.get_added_tokens_decoder().values())
    splits = [(text[:at], text[at:]) for at in range(1, len(text)) if text[at:].startswith(tokens)]
    assert any(ids(head) + ids(rest) != ids(text) for head, rest in splits)


class Shout:
    """A normalizer written in Python, which might do anything."""

    def normalize(self, normalized: Any) -> None:
        normalized.uppercase()


def splitting() -> Tokenizer:
    tokenizer = characters([token("<t>")])
    tokenizer.encode_special_tokens = True
    return tokenizer


UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "merges left out by chance": lambda: characters([token("<t>")], model=models.BPE({"a": 0}, [], dropout=0.1)),
    "another model": lambda: characters([token("<t>")], model=models.Unigram([("a", 0.0)], 0, False)),
    "a normalizer that is not known": lambda: characters([token("<t>")], normalizer=normalizers.Lowercase()),
    "a part that is not known": lambda: characters(
        [token("<t>")],
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex("a"), "isolated"), pre_tokenizers.UnicodeScripts()]
        ),
    ),
    "a step in Python": lambda: characters([token("<t>")], normalizer=normalizers.Normalizer.custom(Shout())),
    "special tokens that are split": splitting,
    "no added tokens": lambda: characters([]),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_tokenizer_that_is_not_known_to_be_safe_is_not_cut(what: str) -> None:
    assert cut_pattern(UNKNOWN[what](), "<t>") is None
    assert cut_pattern(characters([token("<t>")]), "<t>") is not None
