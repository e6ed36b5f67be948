"""The embedded model's vocabulary, for grammars, and an untrained model with the same tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import deployments.demo_model
from engine.grammar.compiler import Compiler
from engine.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.support.oracle import save_tiny

EOS = 2
NUM_TOKENS = 4096
DEMO = Path(deployments.demo_model.__file__).parent


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@cache
def compiler() -> Compiler:
    return Compiler(lambda: Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS]))


def save_random(directory: Path) -> Path:
    """A tiny model with random weights, this tokenizer, and logits for some ids that stand for nothing."""
    save_tiny("llama2", directory, vocab_size=NUM_TOKENS + 64, eos_token_id=EOS, num_hidden_layers=1)
    for file in DEMO.glob("*token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)
