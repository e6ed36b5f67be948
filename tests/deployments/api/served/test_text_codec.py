"""Conversations to token ids, on the tokenizers of many model families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deployments.api.served.text_codec import TextCodec
from engine.model_files.model_directory import demo_model_path
from engine.text.tokenizer import TokenizerPanic, load_tokenizer
from tests.deployments.support.tokenizer_families import FAMILIES, tokenizer_of


@pytest.mark.parametrize("family", FAMILIES)
def test_no_special_token_comes_from_a_users_text(family: str) -> None:
    """Neither those that tokenizer_config.json names, nor the others, which only tokenizer.json has."""
    codec, special = TextCodec(tokenizer_of(family)), FAMILIES[family].special
    harmless = codec.encode_chat([{"role": "user", "content": "a b"}])
    forged = codec.encode_chat([{"role": "user", "content": f"a {''.join(special)} b"}])
    assert [token for token in forged if codec.is_special(token)] == list(filter(codec.is_special, harmless))
    said = codec.decode(forged).replace(" ", "")  # some tokenizers put a space before each text that they encode
    assert "".join(special) in said


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_encoded_as_the_tokenizer_encodes_them(family: str) -> None:
    tokenizer = tokenizer_of(family)
    codec = TextCodec(tokenizer)
    specials = "".join(FAMILIES[family].special)
    for text in ("", " ", "Hello  world\n", f"a {specials} b", "naïve 世界 🙂\u0000", "word " * 2000):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert codec.encode(text, add_special_tokens=special) == ids


def test_a_text_with_which_the_tokenizers_pattern_never_ends_is_an_error(tmp_path: Path) -> None:
    """The tokenizers library panics, which is no `Exception`, and would end more than the request."""
    for path in demo_model_path().iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    pattern = {"Regex": "(x+x+)+y|."}
    content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    codec = TextCodec(load_tokenizer(tmp_path))
    with pytest.raises(TokenizerPanic, match="the tokenizers library gave up"):
        codec.encode("x" * 60)
    assert codec.encode("a")
