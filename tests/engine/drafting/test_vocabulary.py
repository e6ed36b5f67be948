"""A draft model must have the model's vocabulary."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from engine.base.errors import ModelLoadError
from engine.loading.same_vocabulary import check_same_vocabulary
from tests.engine.support.oracle import save_tiny

WORDS = {"a": 0, "b": 1, "c": 2}


def model(directory: Path, words: dict[str, int] | None = None, special: str = "", size: int = 101) -> Path:
    save_tiny("llama2", directory, vocab_size=size, num_hidden_layers=1)
    if words is not None:
        tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
        if special:
            tokenizer.add_special_tokens([AddedToken(special)])
        tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def check(directory: Path, draft: Path) -> None:
    check_same_vocabulary("big", directory, "small", draft)


def test_the_same_tokens_are_the_same_vocabulary(tmp_path: Path) -> None:
    """Other keys of tokenizer.json do not matter."""
    first, second = model(tmp_path / "a", WORDS, "<end>"), model(tmp_path / "b", WORDS, "<end>")
    other = json.loads((second / "tokenizer.json").read_text())
    other["added_tokens"][0]["lstrip"] = True
    (second / "tokenizer.json").write_text(json.dumps(other))
    check(first, second)


def test_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"draft model small .* than big: it has 102 tokens, not 101; name a"):
        check(model(tmp_path / "a"), model(tmp_path / "b", size=102))


@pytest.mark.parametrize(
    ("words", "special", "complaint"),
    [
        ({"a": 0, "c": 1, "b": 2}, "<end>", r"2 tokens have other ids, among them 'b': 2 instead of 1"),
        ({**WORDS, "d": 3}, "<end>", r"2 tokens .* '<end>': 4 instead of 3"),
        (WORDS, "<stop>", r"2 tokens .* '<end>': none instead of 3"),
    ],
)
def test_other_ids_are_refused(tmp_path: Path, words: dict[str, int], special: str, complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        check(model(tmp_path / "a", WORDS, "<end>"), model(tmp_path / "b", words, special))


def test_without_a_tokenizer_only_sizes_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(model(tmp_path / "a", WORDS), model(tmp_path / "b"))
    assert "no tokenizer.json to compare" in caplog.text


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    first, second = model(tmp_path / "a", WORDS), model(tmp_path / "b", WORDS)
    (second / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"b/tokenizer\.json cannot be read"):
        check(first, second)
