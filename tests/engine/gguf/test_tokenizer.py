"""Tokenizers of GGUF files: the same ids and texts as the tokenizers that models had before their conversion."""

# ruff: noqa: RUF001 - texts of many scripts

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from engine.base.errors import ModelLoadError
from engine.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.gguf.tokenizer import made_of
from engine.gguf.vocabulary import GGUFVocabulary
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import decoding_backend, encoding_backend, load_tokenizer
from tests.engine.support.gguf_tokenizers import (
    BYTES,
    CONTROL,
    CONTROLS,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level,
    gpt2_metadata,
    lines,
    llama_metadata,
    original_pieces,
    pieces,
    texts,
    types_of,
    write,
)

COUNT = 2_500
"""How many texts are compared: they find each change of one part of a pattern."""


def made(metadata: Mapping[str, Any]) -> Any:
    return made_of(GGUFVocabulary.of(metadata))


def changed(metadata: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return metadata with other values of keys, "tokens" for "tokenizer.ggml.tokens"; None takes a key away."""
    names = {name: name.replace("__", ".") for name in values}
    keys = {name: key if "." in key else f"tokenizer.ggml.{key}" for name, key in names.items()}
    both = {**metadata, **{keys[name]: value for name, value in values.items()}}
    return {key: value for key, value in both.items() if value is not None}


def assert_same(tokenizer: Any, original: Tokenizer) -> None:
    """Encode and decode many texts with both."""
    given = texts(COUNT)
    backend = tokenizer.backend_tokenizer
    ours = [each.ids for each in backend.encode_batch(given, add_special_tokens=False)]
    wanted = [each.ids for each in original.encode_batch(given, add_special_tokens=False)]
    differing = [text for text, ids, others in zip(given, ours, wanted, strict=True) if ids != others]
    assert differing[:3] == [], f"{len(differing)} of {COUNT}"
    for skips in (False, True):
        read = backend.decode_batch(ours, skip_special_tokens=skips)
        assert read == original.decode_batch(wanted, skip_special_tokens=skips)


# Byte-level tokenizers: the original's way to split, and the file's name for it


def split(*patterns: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def of_class(tokenizer_class: Any) -> tuple[Any, Any]:
    backend = tokenizer_class(vocab={"a": 0}, merges=[]).backend_tokenizer
    return backend.pre_tokenizer, backend.normalizer


LLAMA3, O200K = theirs.GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"], theirs.GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ORIGINALS: dict[str, Any] = {
    "llama-bpe": lambda: (split(LLAMA3), None),
    "dbrx": lambda: (split(LLAMA3), None),
    "tekken": lambda: (split(theirs.GGUF_PRE_TOKENIZER_SPLITS["tekken"]), None),
    "gpt-4o": lambda: (split(O200K), None),
    "minimax-m2": lambda: (split(O200K), None),
    "deepseek-v3": lambda: (split(*DEEPSEEK), None),
    "seed-coder": lambda: (split(SEED), None),
    "smollm": lambda: (digits(), None),
    "gpt-2": lambda: of_class(GPT2Tokenizer),
    "qwen2": lambda: of_class(Qwen2Tokenizer),
    "qwen35": lambda: of_class(Qwen3_5Tokenizer),
    "olmo": lambda: of_class(GPTNeoXTokenizer),
    "command-r": lambda: of_class(CohereTokenizer),
}
SAME_ORIGINALS = {
    "smaug-bpe": "dbrx",
    "glm4": "dbrx",
    "llama4": "gpt-4o",
    "starcoder": "smollm",
    "refact": "smollm",
    "phi-2": "gpt-2",
    "granite-docling": "gpt-2",
    "deepseek-r1-qwen": "qwen2",
}
"""Names whose original splits as that of another name."""


@pytest.mark.parametrize("pre", ORIGINALS)
def test_a_byte_level_tokenizer_is_the_one_that_was_converted(pre: str) -> None:
    special, user = ["<｜begin▁of▁sentence｜>", "<|fim_prefix|>"], ["<think>", "</think>", "    "]
    original = Tokenizer(models.BPE(**_model(PRE_TOKENIZERS[pre].ignores_merges)))
    original.pre_tokenizer, normalizer = ORIGINALS[pre]()
    if normalizer is not None:
        original.normalizer = normalizer
    original.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]
    original.add_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    original.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])
    tokenizer = made(gpt2_metadata(pre, special, user))
    assert_same(tokenizer, original)
    assert encoding_backend(tokenizer) is not None and decoding_backend(tokenizer) is not None


@pytest.mark.parametrize("pre", SAME_ORIGINALS)
def test_names_with_the_same_original_are_read_alike(pre: str) -> None:
    assert PRE_TOKENIZERS[pre] == PRE_TOKENIZERS[SAME_ORIGINALS[pre]]


def _model(ignores_merges: bool) -> dict[str, Any]:
    merges = [tuple(merge) for merge in byte_level()["merges"]]
    return {"vocab": byte_level()["vocab"], "merges": merges, "ignore_merges": ignores_merges}


def test_a_word_that_is_a_token_needs_no_merges_where_the_original_looks_it_up_first() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for pre, looks_up in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        vocabulary = changed(
            gpt2_metadata(pre), tokens=[*alphabet, "word", "wo"], merges=["w o"], token_type=None,
            eos_token_id=None, padding_token_id=None,
        )  # fmt: skip
        ids = made(vocabulary).encode("word", add_special_tokens=False)
        assert (ids == [256]) is looks_up and (len(ids) == 3) is not looks_up


def test_the_tokenizer_equals_the_one_that_transformers_makes_of_the_same_file(tmp_path: Path) -> None:
    path = write(gpt2_metadata("llama-bpe"), tmp_path / "model.gguf")
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert_same(load_tokenizer(path), other.backend_tokenizer)


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_that_does_not_say_how_to_split_is_read_as_llama_cpp_reads_it(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = made(gpt2_metadata(pre))
    assert "does not say how its tokenizer splits texts" in caplog.text
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a b,c 1234567")
    assert [word for word, _ in words] == ["a", "Ġb", ",", "c", "Ġ", "123", "456", "7"]


def test_an_unknown_way_to_split_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre is 'new', .*known are chatglm-bpe, .*tekken"):
        made(gpt2_metadata("new"))


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_may_begin_with_a_space(adds: bool) -> None:
    tokenizer = made(changed(gpt2_metadata("gpt-2"), add_space_prefix=adds))
    assert (tokenizer.encode("the") == tokenizer.encode(" the")) is adds


# Tokenizers of SentencePiece's kind


def test_llama_2_merges_by_score_and_begins_each_part_of_a_text_with_a_space() -> None:
    tokens, types = pieces(), types_of(pieces())
    original = original_pieces(tokens, types, by_score=True, strips=True)
    original.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer = made(llama_metadata("llama", tokens, types))
    assert_same(tokenizer, original)
    assert tokenizer.encode("the")[0] == 1 and tokenizer.decode(tokenizer.encode("a  b"), True) == "a  b"


def test_merges_are_those_of_sentencepiece() -> None:
    """It merges the neighbours whose token has the highest score, the first of them if there are several."""
    tokens, types = pieces(), types_of(pieces())
    ids = {token: at for at, token in enumerate(tokens) if types[at] == NORMAL}
    tokenizer = made(llama_metadata("llama", tokens, types))

    def merged(text: str) -> list[int]:
        parts = list(f"{SPACE}{text}".replace(" ", SPACE))
        while pairs := [(ids[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]:
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        bytes_of = {f"<0x{byte:02X}>": at for at, byte in enumerate(range(256), tokens.index(BYTES[0]))}
        spelled = [
            [ids[part]] if part in ids else [bytes_of[f"<0x{b:02X}>"] for b in part.encode()] for part in parts
        ]
        return [token for part in spelled for token in part]

    given = [text for text in texts(1000) if text and not any(mark in text for mark in ("<s>", "</s>", "<unk>"))]
    assert [tokenizer.encode(text, add_special_tokens=False) for text in given] == [merged(text) for text in given]


def test_mistrals_tokenizer_begins_only_a_whole_text_with_a_space() -> None:
    tokens = [*pieces(), "[INST]", "[/INST]"]
    types = types_of(tokens, control=["[INST]", "[/INST]"])
    original = original_pieces(tokens, types, by_score=True, strips=True)
    original.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    assert_same(made(llama_metadata("llama", tokens, types)), original)


def test_phi_3_strips_the_spaces_after_the_marks_of_turns() -> None:
    marks = ["<|user|>", "<|end|>"]
    tokens = [*pieces(), "<|endoftext|>", *marks]
    tokenizer = made(llama_metadata("phi3", tokens, types_of(tokens, control=["<|endoftext|>", *marks])))
    strip = {text for text, token in _added(tokenizer).items() if token.rstrip}
    assert strip == {"</s>", *marks}
    assert tokenizer.encode("<|user|>\nHi") == tokenizer.encode("<|user|>Hi")


def test_gemma_merges_in_the_order_of_its_tokens_and_reads_runs_of_spaces_as_one_token() -> None:
    """Converters write its tokens of spaces as spaces."""
    runs = [SPACE * length for length in (2, 3, 4, 8)]
    user = ["\n\n", "\n\n\n", "<td>", *runs]
    head = len(["<unk>", *CONTROLS, *BYTES])
    plain = [token for token in pieces()[head:] if token not in user]
    tokens = [*pieces()[:head], *user, *plain]
    types = types_of(tokens, user=user)
    original = original_pieces(tokens, types, by_score=False, strips=False)
    original.normalizer = normalizers.Replace(" ", SPACE)
    written = [token.replace(SPACE, " ") if token in runs else token for token in tokens]
    metadata = changed(llama_metadata("gemma3", written, types), add_space_prefix=False)
    metadata["tokenizer.ggml.scores"] = [0.0] * len(tokens)  # whose order is another one
    assert_same(made(metadata), original)


def test_gemma_4_has_merges_and_bytes_and_its_template_begins_texts() -> None:
    tokens, types = pieces(), types_of(pieces())
    original = original_pieces(tokens, types, by_score=True, strips=False)
    original.normalizer = normalizers.Replace(" ", SPACE)
    merges = [" ".join(merge) for merge in _merges(original)]
    metadata = changed(llama_metadata("gemma4", tokens, types), model="gemma4", merges=merges, scores=None)
    tokenizer = made({**metadata, "tokenizer.ggml.add_bos_token": True})
    assert_same(tokenizer, original)
    assert 1 not in tokenizer.encode("a")


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


def test_a_unigram_tokenizer_takes_the_likeliest_tokens() -> None:
    original = Tokenizer(models.Unigram())
    original.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    original.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "never", split=True)
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=1200, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    original.train_from_iterator(lines(), trainer)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    original.decoder = decoders.Sequence(steps)
    scored = json.loads(original.to_str())["model"]["vocab"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [*(token for token, _ in scored), "[PAD1]"],
        "tokenizer.ggml.scores": [*(float(score) for _, score in scored), -1000.0],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(scored) - 3), UNUSED],
    }
    tokenizer = made(metadata)
    assert_same(tokenizer, original)
    assert tokenizer.encode("a")[-1] == 1 == tokenizer.eos_token_id


def test_user_defined_tokens_are_no_special_tokens() -> None:
    metadata = gpt2_metadata("qwen2", user=["<think>"])
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert metadata["tokenizer.ggml.token_type"][last] == USER_DEFINED
    assert last not in GGUFVocabulary.of(metadata).special_ids()


def test_several_spaces_are_one_where_the_file_says_so() -> None:
    metadata = changed(llama_metadata("llama", pieces(), types_of(pieces())), remove_extra_whitespaces=True)
    tokenizer = made(metadata)
    assert (
        tokenizer.encode("  a   b ")
        == tokenizer.encode("a b")
        != made(changed(metadata, remove_extra_whitespaces=False)).encode("  a   b ")
    )


# What else a file says


def _added(tokenizer: Any) -> dict[str, Any]:
    return {str(token): token for token in tokenizer.added_tokens_decoder.values()}


def test_token_types_decide_which_are_found_first_and_which_a_text_does_not_show() -> None:
    metadata = gpt2_metadata("qwen2", ["<|fim_prefix|>"], ["<think>"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD9]", ""]
    metadata["tokenizer.ggml.token_type"] += [UNUSED, NORMAL]
    tokenizer = made(metadata)
    assert {text for text, token in _added(tokenizer).items() if token.special} == {
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>",
    }  # fmt: skip
    assert not _added(tokenizer)["<think>"].special and "[PAD9]" not in tokenizer.get_vocab()
    ids = tokenizer.encode("<think>a<|fim_prefix|>")
    assert len(ids) == 3 and tokenizer.decode(ids, skip_special_tokens=True) == "<think>a"
    decoder = Detokenizer(tokenizer).decoder()
    assert decoder.push(ids) + decoder.rest() == "<think>a"


def test_special_tokens_have_their_names_for_templates() -> None:
    metadata = changed(gpt2_metadata("qwen2"), bos_token_id=1)
    tokenizer = made(metadata)
    assert tokenizer.special_tokens_map == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    }  # fmt: skip
    assert tokenizer.eos_token_id == byte_level()["vocab"]["<|im_end|>"]
    assert "bos_token" not in made(gpt2_metadata("qwen2")).special_tokens_map


@pytest.mark.parametrize(
    ("pre", "flags", "begins", "ends"),
    [
        ("qwen2", {"add_bos_token": None}, False, False),
        ("llama-bpe", {"add_bos_token": None}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_texts_begin_and_end_with_special_tokens_if_the_file_says_so(
    pre: str, flags: dict[str, Any], begins: bool, ends: bool
) -> None:
    tokenizer = made(changed(gpt2_metadata(pre), bos_token_id=1, **flags))
    ids = tokenizer.encode("a")
    assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)
    assert tokenizer.encode("a", add_special_tokens=False) == [each for each in ids if each > 2]


def test_templates_are_one_or_several_by_name(tmp_path: Path) -> None:
    metadata = gpt2_metadata("qwen2")
    assert made(metadata).chat_template is None
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    assert made(metadata).chat_template == "{{ messages }}"
    metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    tokenizer: Any = load_tokenizer(write(metadata, tmp_path / "model.gguf"))
    assert tokenizer.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert tokenizer.get_chat_template(tools=[{}]) == "{{ tools }}"


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], {}, ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
        (["<|a|>", "<|b|>", "<|c|>"], {"eot_token_id": "<|a|>", "eom_token_id": "<|b|>"}, ["<|a|>", "<|b|>"]),
        (["<|return|>", "<|call|>", "<|end|>"], {}, ["<|return|>", "<|call|>"]),
        (["<|end|>"], {}, ["<|end|>"]),
        (["<eos>", "<turn|>", "<|tool_response>", "</s>"], {}, ["<eos>", "<turn|>", "<|tool_response>"]),
    ],
)
def test_a_text_ends_at_each_token_that_is_known_to_end_one(
    tokens: list[str], named: dict[str, str], ends: list[str]
) -> None:
    metadata = gpt2_metadata("llama-bpe", tokens)
    at = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    metadata = changed(metadata, **{key: at[token] for key, token in named.items()})
    usual = {"<|endoftext|>", "<|im_end|>"}
    assert GGUFVocabulary.of(metadata).end_ids() == {at[token] for token in usual.union(ends)}


def test_an_ordinary_token_of_such_a_spelling_ends_nothing() -> None:
    metadata = gpt2_metadata("qwen2")
    metadata["tokenizer.ggml.tokens"].append("</s>")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert len(metadata["tokenizer.ggml.tokens"]) - 1 not in GGUFVocabulary.of(metadata).end_ids()


# Hostile and damaged files

SOUND = gpt2_metadata("qwen2")
LLAMA = llama_metadata("llama", pieces(), types_of(pieces()))
NUM = len(SOUND["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (changed(SOUND, model="rwkv"), r"the tokenizer 'rwkv' .*supported are gpt2, llama, t5, gemma4"),
        (changed(SOUND, model=None), "the file has no tokenizer; supported are"),
        (changed(SOUND, model=7), r"tokenizer\.ggml\.model is 7, and a string was expected"),
        (changed(SOUND, tokens=None), r"tokenizer\.ggml\.tokens has no tokens"),
        (changed(SOUND, tokens=[]), r"tokenizer\.ggml\.tokens has no tokens"),
        (changed(SOUND, tokens="abc"), r"tokens is 'abc', and a list of at most 1048576 values was expected"),
        (changed(SOUND, tokens=["a", 3]), "tokens has 3 as number 1, and .*each a string"),
        (changed(SOUND, tokens=["a", "b", "a"]), "tokens has 'a' twice, as numbers 0 and 2"),
        (changed(SOUND, tokens=["a" * 1025]), "a token of 1025 characters as number 0, and at most 1024"),
        (
            changed(SOUND, tokens=[f"{at:01024}" for at in range(2**14 + 1)]),
            "tokens has 16778240 characters, and at most 16777216",
        ),
        (changed(SOUND, tokens=["a"] * (2**20 + 1)), "tokens has 1048577 values, and a list of at most 1048576"),
        (changed(SOUND, token_type=[1, 1]), f"token_type has 2 values and tokenizer.ggml.tokens {NUM}"),
        (changed(SOUND, token_type=[1] * (NUM - 1) + [9]), f"has 9 for token {NUM - 1}, and one of 1 to 6"),
        (changed(SOUND, token_type=[1.0] * NUM), r"token_type has 1\.0 as number 0"),
        (changed(SOUND, merges=None), r"lacks tokenizer\.ggml\.merges, which a tokenizer of the kind gpt2 needs"),
        (changed(SOUND, merges=["ab"]), "merges has 'ab' as number 0, and two tokens with a space between"),
        (changed(SOUND, merges=["a "]), "merges has 'a ' as number 0, and two tokens with a space between"),
        (changed(SOUND, merges=["a b", "Ġ§ a"]), "merges has 'Ġ§ a' as number 1, and 'Ġ§' is none of the file's"),
        (changed(SOUND, merges=["é ß"]), "and 'éß' is none of the file's tokens"),
        (changed(SOUND, eos_token_id=NUM), f"eos_token_id is {NUM}, .*0 to {NUM - 1}"),
        (changed(SOUND, eot_token_id=-1), "eot_token_id is -1, and one of the file's tokens"),
        (changed(SOUND, bos_token_id="<s>"), "bos_token_id is '<s>', and an integer was expected"),
        (changed(SOUND, bos_token_id=True), "bos_token_id is True, and an integer was expected"),
        (changed(SOUND, add_bos_token=1), "add_bos_token is 1, and true or false was expected"),
        (changed(SOUND, add_bos_token=True), r"add_bos_token is true, and the file lacks .*bos_token_id"),
        (changed(SOUND, tokenizer__chat_template=["a"]), "chat_template is a list of 1, and a string was"),
        (changed(SOUND, tokenizer__chat_templates=["x"]), r"chat_templates names 'x', and the file lacks"),
        (
            {**SOUND, **{f"tokenizer.chat_template.n{at}": "x" for at in range(65)}},
            "65 chat templates, and at most 64",
        ),
        (changed(LLAMA, scores=[0.5]), "scores has 1 values and tokenizer.ggml.tokens"),
        (changed(LLAMA, scores=None), r"neither tokenizer\.ggml\.scores nor tokenizer\.ggml\.merges"),
        (changed(LLAMA, scores=[float("nan")] * len(pieces())), "scores has nan for token 0, and a finite number"),
        (changed(LLAMA, scores=["x"] * len(pieces())), "scores has 'x' as number 0, and .*each a number"),
        (changed(LLAMA, model="t5", scores=None), r"lacks tokenizer\.ggml\.scores"),
        (
            changed(LLAMA, model="t5", token_type=[NORMAL] * len(pieces()), unknown_token_id=None),
            r"no token for unknown text: expected tokenizer\.ggml\.unknown_token_id",
        ),
        (changed(LLAMA, model="t5", precompiled_charsmap=[999]), "charsmap has numbers that are no bytes"),
        (changed(LLAMA, model="t5", precompiled_charsmap=[1, 2, 3]), "the file's tokens make no tokenizer"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_a_tokenizer_are_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        made(metadata)
    assert len(str(caught.value)) < 1000


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = write(changed(SOUND, eos_token_id=NUM), tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=f"no usable tokenizer in {path}: expected a GGUF file.*eos_token_id"):
        load_tokenizer(path)


def test_a_template_that_would_take_minutes_to_compile_is_refused(tmp_path: Path) -> None:
    path = write({**SOUND, "tokenizer.chat_template": "x" * (2**20 + 1)}, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="chat templates have 1048577 characters, and at most 1048576"):
        load_tokenizer(path)


def test_too_many_added_tokens_are_refused(tmp_path: Path) -> None:
    added = [f"<|{at}|>" for at in range(100_001)]
    path = write(gpt2_metadata("qwen2", added), tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="adds 100004 tokens to its vocabulary, and at most 100000"):
        load_tokenizer(path)
