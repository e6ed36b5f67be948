"""Loading tokenizers: the fast path must give the same tokenizer as the slow one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.loading.model_directory import demo_model_path
from engine.tokenizer import load_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja")


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_it_is_the_tokenizer_that_transformers_loads(tmp_path: Path, model_type: str, named: str) -> None:
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


def change(path: Path, **fields: str) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
