"""Text after a prompt is what `transformers` makes of prompt and output together, beyond the prompt's own text."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import LLM, SamplingParams
from engine.text.detokenizer import Detokenizer, TextStream
from engine.text.tokenizer import Tokenizer
from tests.support.examples import examples

SPECIALS = ("<unk>", "<s>", "</s>", "<|x|>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [*"▁ab漢.", "▁a", "▁b", "ab", "▁ab", "▁▁", "▁."]
MERGES = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁", ".")]
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SPACED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def bpe() -> Any:
    ids = {token: number for number, token in enumerate([*SPECIALS, *BYTES, *WORDS])}
    return models.BPE(ids, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def unigram() -> Any:
    pieces = [
        (token, -float(len(SPECIALS) + at)) for at, token in enumerate([*SPECIALS, *BYTES, *reversed(WORDS)])
    ]
    return models.Unigram(pieces, unk_id=0, byte_fallback=True)


def word_piece() -> Any:
    words = [*SPECIALS, "a", "b", "ab", ".", "##a", "##b", "##ab", "漢"]
    return models.WordPiece({token: number for number, token in enumerate(words)}, unk_token="<unk>")


def metaspace(scheme: str) -> tuple[Any, Any, Any]:
    options: Any = {"replacement": "▁", "prepend_scheme": scheme, "split": False}
    return None, pre_tokenizers.Metaspace(**options), decoders.Metaspace(**options)


KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "llama-2": (bpe, PREPENDED, None, decoders.Sequence([*SPACED, decoders.Strip(" ", 1, 0)])),
    "gemma": (bpe, normalizers.Replace(" ", "▁"), None, decoders.Sequence(SPACED)),
    "prepended, not stripped": (bpe, PREPENDED, None, decoders.Sequence(SPACED)),
    "first": (bpe, *metaspace("first")),
    "always": (bpe, *metaspace("always")),
    "never": (bpe, *metaspace("never")),
    "bytes, then spaces": (
        bpe,
        *metaspace("first")[:2],
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ),
    "two stripped": (bpe, PREPENDED, None, decoders.Sequence([*SPACED, decoders.Strip(" ", 2, 0)])),
    "unigram": (unigram, *metaspace("always")),
    "word pieces": (word_piece, None, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)),
}  # fmt: skip


@functools.cache
def tokenizer_of(kind: str) -> Any:
    model, normalizer, pre_tokenizer, decoder = KINDS[kind]
    inner = tokenizers.Tokenizer(model())
    if normalizer is not None:
        inner.normalizer = normalizer
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoder
    inner.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    inner.add_tokens([AddedToken("<call>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@functools.cache
def detokenizer_of(kind: str) -> Detokenizer:
    return Detokenizer(cast(Tokenizer, tokenizer_of(kind)))


def streamed(kind: str, prompt: Sequence[int], output: Sequence[int], sizes: Sequence[int], skips: bool) -> str:
    detokenizer = detokenizer_of(kind)
    text = TextStream(detokenizer.decoder(() if skips else detokenizer.specials, prompt))
    shown, at = "", 0
    for size in [*sizes, len(output)]:
        shown += text.push(output[at : at + size]).text
        at += size
    return shown + text.finish()


ids = st.lists(st.one_of(st.integers(0, 7), st.integers(0, len(SPECIALS) + 256 + len(WORDS))), max_size=12)
texts = st.text(st.sampled_from("ab. 漢😀"), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=examples(100))
@given(data=st.data(), skips=st.booleans(), sizes=st.lists(st.integers(0, 3), max_size=12))
def test_output_is_the_text_of_prompt_and_output_after_that_of_the_prompt(
    kind: str, data: st.DataObject, skips: bool, sizes: list[int]
) -> None:
    """Of any tokens, special ones and spaces at every place included."""
    tokenizer = tokenizer_of(kind)
    as_text = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    known = st.sampled_from(sorted(tokenizer.get_vocab().values()))
    some = st.one_of(as_text, st.lists(known, max_size=12))
    prompt, output = data.draw(some), data.draw(some)
    before, whole = (tokenizer.decode(part, skip_special_tokens=skips) for part in (prompt, prompt + output))
    assume("\ufffd" not in whole and whole.startswith(before))
    assert streamed(kind, prompt, output, sizes, skips) == whole[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
def test_only_where_no_text_precedes_the_first_word_has_no_space(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    word = tokenizer.convert_tokens_to_ids("▁ab" if kind != "word pieces" else "ab")
    begin, other = tokenizer.convert_tokens_to_ids(["<s>", "<|x|>"])
    prompt = tokenizer.encode("a b", add_special_tokens=False)
    at_first = tokenizer.decode([word])
    for before in ([], [begin], [begin, other] * 40):
        assert streamed(kind, before, [word], [], skips=True) == at_first
    for before in (prompt, [begin, *prompt], [*prompt, *[other] * 40], prompt * 40):
        assert streamed(kind, before, [word], [], skips=True) == " ab"


@pytest.mark.parametrize("kind", ["llama-2", "two stripped", "bytes, then spaces"])
@pytest.mark.parametrize("num_before", [0, 1, 40])
def test_a_character_that_begins_in_the_prompt_comes_whole(kind: str, num_before: int) -> None:
    """Whatever precedes it, such as a long run of characters that are bytes too."""
    tokenizer = tokenizer_of(kind)
    character = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "😀".encode()])
    prompt = [*tokenizer.encode("a", add_special_tokens=False), *character * num_before]
    for cut in range(1, 4):
        rest = [*character[cut:], *tokenizer.convert_tokens_to_ids(["a"])]
        assert streamed(kind, [*prompt, *character[:cut]], rest, [1] * 4, skips=True) == "😀a"
    assert streamed(kind, prompt, character, [1] * 4, skips=True) == "😀"


def test_text_long_before_an_output_costs_nothing() -> None:
    """Only the last tokens of a prompt are decoded, even if they begin inside a character."""
    counted: list[int] = []

    class Counting:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            counted.append(len(token_ids))
            return str(tokenizer_of("first").decode(token_ids, skip_special_tokens=skip_special_tokens))

    word, broken = tokenizer_of("first").convert_tokens_to_ids(["▁ab", "<0xA9>"])
    for before in (word, broken):
        decoder = Detokenizer(cast(Tokenizer, Counting())).decoder(after=[before] * 10_000)
        assert decoder.push([word]) == " ab"
    assert sum(counted) < 2_000


def test_offline_a_completion_continues_its_prompt_and_an_answer_is_a_text_of_its_own() -> None:
    llm, tokenizer = LLM("demo", kv_pages=64), copy.copy(tokenizer_of("llama-2"))
    tokenizer.chat_template = "{{ messages[0].content }}[/INST]"
    llm.tokenizer, llm._detokenizer = tokenizer, detokenizer_of("llama-2")
    word, begin = tokenizer.convert_tokens_to_ids(["▁ab", "<s>"])
    params = SamplingParams(temperature=0, max_tokens=2, logit_bias={word: 100.0})
    outputs = llm.generate(["a b", [begin]], params, progress=False)
    assert [output.text for output in outputs] == [" ab ab", "ab ab"]
    (stopped,) = llm.generate(["a b"], replace(params, stop=(" ab",)), progress=False)
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    assert llm.chat([{"role": "user", "content": "a b"}], params)[0].text == "ab ab"
