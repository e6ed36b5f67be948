"""Loading tokenizers: the fast path must give the same tokenizer as the slow one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.model_files.model_directory import demo_model_path
from engine.text.tokenizer import encoding_backend, load_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja")


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokenizer_equals_the_one_that_transformers_loads(tmp_path: Path, model_type: str, named: str) -> None:
    for name in FILES:
        shutil.copy(demo_model_path() / name, tmp_path)
    change(tmp_path / "config.json", model_type=model_type)
    change(tmp_path / "tokenizer_config.json", tokenizer_class=named)
    ours: Any = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours.chat_template == theirs.chat_template
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


@pytest.mark.parametrize("broken", ["no tokenizer", "{}"])
def test_a_directory_without_a_usable_tokenizer_is_named(tmp_path: Path, broken: str) -> None:
    for name in FILES:
        shutil.copy(demo_model_path() / name, tmp_path)
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ValueError, match=f"no usable tokenizer in {tmp_path}"):
        load_tokenizer(tmp_path)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_backend_encodes_as_the_tokenizer_does(tmp_path: Path) -> None:
    """Even where tokenizer.json truncates and pads, or special tokens are to be split."""
    for name in FILES:
        shutil.copy(demo_model_path() / name, tmp_path)
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    change(tmp_path / "tokenizer.json", truncation=truncation, padding=padding)
    for splits in (False, True):
        change(tmp_path / "tokenizer_config.json", split_special_tokens=splits)
        tokenizer, theirs = load_tokenizer(tmp_path), load_tokenizer(tmp_path)
        backend = encoding_backend(tokenizer)
        assert backend is not None
        for text in ("Hello", "<|im_start|>user\nHow do I sort a list in place?<|im_end|>\n"):
            assert backend.encode(text).ids == theirs.encode(text)


def test_a_tokenizer_that_does_more_than_its_backend_has_none(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(demo_model_path() / name, tmp_path)
    tokenizer: Any = load_tokenizer(tmp_path)
    assert encoding_backend(tokenizer) is not None

    class Lowering(type(tokenizer)):  # type: ignore[misc]
        def _encode_plus(self, text: str, **options: Any) -> Any:
            return super()._encode_plus(text.lower(), **options)

    class Bare:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [1]

    lowering: Any = Lowering.from_pretrained(str(tmp_path))
    assert lowering.encode("A") == lowering.encode("a") and encoding_backend(lowering) is None
    assert encoding_backend(Bare()) is None  # type: ignore[arg-type]
