"""A model directory with what is no file, is endless, or is nested without end: a clear error, and at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.base.errors import ModelLoadError
from engine.loading.weight_streaming import stored_tensors
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path, resolve_model
from engine.model_files.weight_files import weight_files
from engine.text.tokenizer import MAX_ADDED_TOKENS, load_tokenizer

DEEP = "[" * 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model whose files may be changed."""
    for path in demo_model_path().iterdir():
        if path.suffix in (".json", ".jinja", ".safetensors"):
            shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["FIFO", "directory", "character device"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
     "model.safetensors.index.json",
     "chat_template.jinja", "special_tokens_map.json", "tokenizer.model", "vocab.txt"],
)  # fmt: skip
def test_anything_but_a_file_is_refused_by_name(model: Path, name: str, kind: str) -> None:
    path = model / name
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=f"{name} cannot be read: it is a {kind}"):
        resolve_model(str(model))
    with pytest.raises(ValueError, match=f"is a {kind}"):
        load_tokenizer(model)


def test_weights_whose_header_has_no_end_are_refused(model: Path) -> None:
    (model / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="header"):
        stored_tensors(weight_files(model))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_nested_without_end_is_refused(model: Path, name: str) -> None:
    (model / name).write_text(DEEP)
    with pytest.raises(ModelLoadError, match=f"{name} is not readable JSON: it is nested too deeply"):
        ModelConfig.from_directory(model)


def test_an_index_that_is_nested_without_end_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(DEEP)
    with pytest.raises(ModelLoadError, match="is not a weight index"):
        weight_files(model)


def _pattern(pattern: str) -> Callable[[dict[str, Any]], None]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda tokenizer: tokenizer.update(pre_tokenizer=split)


def _many_tokens(tokenizer: dict[str, Any]) -> None:
    same = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": 5000 + at, "content": f"<t{at}>", "special": True, **same} for at in range(MAX_ADDED_TOKENS)
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_pattern("(a+)+$|(a|a)*b|(x+x+)+y"), "the tokenizers library gave up"),
        (_many_tokens, f"at most {MAX_ADDED_TOKENS} are supported"),
        (lambda tokenizer: tokenizer.update(model={"type": "BPE"}), "no usable tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    model: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    change(content)
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        load_tokenizer(model)


def test_a_tokenizer_that_is_nested_without_end_is_refused(model: Path) -> None:
    (model / "tokenizer.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"tokenizer.json is not readable JSON"):
        load_tokenizer(model)
