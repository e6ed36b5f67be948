"""The embedded model's vocabulary, for grammars."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import deployments.demo_model
from engine.grammar.compiler import Compiler
from engine.grammar.vocabulary import Vocabulary
from engine.tokenizer import Tokenizer, load_tokenizer

EOS = 2
NUM_TOKENS = 4096
DEMO = Path(deployments.demo_model.__file__).parent


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@cache
def compiler() -> Compiler:
    return Compiler(lambda: Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS]))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)
