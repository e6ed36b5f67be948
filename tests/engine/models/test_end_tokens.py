"""A text ends at each token that one of a checkpoint's files names as its end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.base.errors import ModelLoadError
from engine.model_config.config import ModelConfig
from engine.text.end_tokens import tokenizer_end
from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import VOCAB, oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import engine_for, run_prompts, tokens_of

WORDS = [f"w{number}" for number in range(VOCAB)]
KINDS: dict[str, Any] = {
    "WordLevel": lambda: models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"),
    "Unigram": lambda: models.Unigram([(word, -1.0) for word in WORDS], unk_id=0),
    "BPE": lambda: models.BPE({word: number for number, word in enumerate(WORDS)}, []),
    "WordPiece": lambda: models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="w0"),
}


def save_tokenizer(directory: Path, end: str | None, kind: str = "WordLevel") -> Path:
    """Save a tokenizer whose token number N is "wN"."""
    backend = Tokenizer(KINDS[kind]())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end).save_pretrained(directory)
    return directory


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["w7", "<|new|>"])
def test_the_end_token_is_the_one_that_transformers_finds(kind: str, end: str, tmp_path: Path) -> None:
    """Whether it is a word of the vocabulary or was added to it."""
    expected = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(tmp_path, end, kind)).eos_token_id
    assert tokenizer_end(tmp_path) == expected == {"w7": 7, "<|new|>": VOCAB}[end]


def test_old_files_name_the_end_token_elsewhere(tmp_path: Path) -> None:
    """As an object, in a file of special tokens, among tokens that are listed with their numbers."""
    config = save_tokenizer(tmp_path, None) / "tokenizer_config.json"
    assert tokenizer_end(tmp_path) is None
    edit(config, eos_token={"__type": "AddedToken", "content": "w9"})
    assert tokenizer_end(tmp_path) == 9
    edit(config, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "w8"}}))
    assert tokenizer_end(tmp_path) == 8
    edit(config, eos_token="<end>", added_tokens_decoder={"500": {"content": "<end>"}})
    assert tokenizer_end(tmp_path) == 500
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps({"w6": 6}))
    edit(config, eos_token="w6")
    assert tokenizer_end(tmp_path) == 6


def test_an_end_that_the_tokenizer_lacks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(save_tokenizer(tmp_path, None) / "tokenizer_config.json", eos_token="<nowhere>")
    assert tokenizer_end(tmp_path) is None
    assert "names eos_token '<nowhere>', which the tokenizer does not have" in caplog.text


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 2, {5, 6, 7}),
        ({"eos_token_id": 7}, 2, {7}),
        ({"eos_token_id": None}, 2, {2, 7}),
        ({}, None, {7}),
        (None, [2, 3], {2, 3, 7}),
    ],
    ids=str,
)
def test_the_end_token_of_the_tokenizer_ends_a_text_too(
    generation: dict[str, Any] | None, config: Any, expected: set[int], tmp_path: Path
) -> None:
    save_tokenizer(save_tiny("llama2", tmp_path, eos_token_id=config), "w7")
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("wrong", ["2", [1, "x"], True, 1.5])
def test_an_invalid_end_token_is_refused(wrong: Any, tmp_path: Path) -> None:
    (save_tiny("llama2", tmp_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ModelLoadError, match=r"eos_token_id has .*: expected a token id or a list of them"):
        ModelConfig.from_directory(tmp_path)


def test_an_answer_ends_there_but_not_before_its_least_tokens(tmp_path: Path) -> None:
    model, prompt = save_tiny("llama2", tmp_path / "model"), random_ids(1, 9)
    tokens = oracle_greedy(model, prompt, 12)
    end = next(token for token in tokens[1:] if token != tokens[0])
    shutil.copytree(model, tmp_path / "named")
    save_tokenizer(tmp_path / "named", f"w{end}")
    engine = engine_for(tmp_path / "named", 16, 1024)
    first = tokens.index(end) + 1
    [events] = run_prompts(engine, [prompt], SamplingParams(temperature=0, max_tokens=12))
    assert tokens_of(events) == tokens[:first] and events[-1].finish_reason == "stop"
    [events] = run_prompts(engine, [prompt], SamplingParams(temperature=0, max_tokens=12, min_tokens=first + 1))
    assert end not in tokens_of(events)[: first + 1]
