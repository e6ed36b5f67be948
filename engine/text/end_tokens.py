"""Finds the tokens that end a text: those of generation_config.json, or else config.json, and of the tokenizer.

Servers stop at all of them, because the files of a checkpoint often disagree: tuning changes only some of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import ModelLoadError
from engine.model_files.json_files import read_object
from engine.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def end_tokens(*configs: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens of the first of these configs that names any. Raises ModelLoadError."""
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if wrong := [each for each in ids if each is not None and type(each) is not int]:
            raise ModelLoadError(f"eos_token_id has {wrong[0]!r}: expected a token id or a list of them")
        if value is not None:
            return frozenset(each for each in ids if each is not None)
    return frozenset()


def tokenizer_end(directory: Path) -> int | None:
    """Return the id of the token with which a model's tokenizer ends a text. None if it names no token, or one
    that it does not have, which is logged; also None for a GGUF file, whose metadata has all such tokens.
    """
    config = read_object(directory / "tokenizer_config.json")
    named = config.get("eos_token") or read_object(directory / "special_tokens_map.json").get("eos_token")
    token = named.get("content") if isinstance(named, dict) else named
    if token is None:
        return None
    for number, added in (config.get("added_tokens_decoder") or {}).items():
        if added.get("content") == token:
            return int(number)
    whole = read_object(directory / "tokenizer.json")
    for added in whole.get("added_tokens") or ():
        if added.get("content") == token:
            return int(added["id"])
    vocabularies = (
        (whole.get("model") or {}).get("vocab"),
        read_object(directory / "vocab.json"),
        read_object(directory / "added_tokens.json"),
    )
    for vocabulary in vocabularies:
        if isinstance(vocabulary, dict) and token in vocabulary:
            return int(vocabulary[token])
        if isinstance(vocabulary, list):  # Unigram: pieces with their scores
            pieces = [piece for piece, _ in vocabulary]
            if token in pieces:
                return pieces.index(token)
    if not whole and (directory / "tokenizer.model").exists():  # only a library reads its pieces
        number = load_tokenizer(directory).eos_token_id
        if number is not None:
            return number
    logger.warning(
        "%s: tokenizer_config.json names eos_token %r, which the tokenizer does not have", directory, token
    )
    return None
