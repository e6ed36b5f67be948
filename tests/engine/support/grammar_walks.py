"""Answers that a grammar allows, written without a model: tokens are chosen among those that a mask allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from engine.grammar.compiler import compile_grammar
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import LoadedVocabulary, Vocabulary
from tests.engine.support.grammar_models import EOS, NUM_TOKENS, ids, tokenizer


@cache
def _vocabulary() -> LoadedVocabulary:
    return Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS]).load()


@cache
def _by_haste(closers: bytes) -> npt.NDArray[np.int64]:
    """All tokens but the end, first those that are one of `closers`, then by their length."""
    vocabulary = _vocabulary().tokenizer

    def haste(token: int) -> tuple[int, int]:
        text = vocabulary.decode_bytes([token])
        return closers.find(text) if len(text) == 1 and text in closers else len(closers), len(text)

    return np.array(sorted((token for token in range(NUM_TOKENS) if token != EOS), key=haste))


def _in_string(text: str) -> bool:
    """Whether a JSON text ends within a string."""
    return len(re.findall(r'(?<!\\)"', text.replace("\\\\", ""))) % 2 == 1


def walk(grammar: Grammar, choices: Sequence[int], most: int) -> tuple[str, str]:
    """Follow a grammar: by `choices` first, then towards the end, for at most so many tokens.

    Returns how it ended, "complete", "long" or llguidance's complaint, and what was written. Raises
    InvalidGrammar.
    """
    matcher = compile_grammar(grammar, _vocabulary()).deep_copy()
    written: list[int] = []
    for step in range(most):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = mask[:NUM_TOKENS].nonzero()[0]
        if matcher.is_error() or not len(allowed):
            return f"dead end: {matcher.get_error()[:200]}", _text(written)
        if step < len(choices):
            token = int(allowed[choices[step] % len(allowed)])
        elif mask[EOS]:
            token = EOS
        else:
            closers = b'"' if _in_string(_text(written)) else b"}]"
            hasty = [int(one) for one in _by_haste(closers) if mask[one]]
            closes = _vocabulary().tokenizer.decode_bytes(hasty[:1]) in (b"}", b"]", b'"')
            token = hasty[0] if closes else hasty[7 * step % min(len(hasty), 12)]
        if token == EOS:
            return "complete", _text(written)
        matcher.try_consume_tokens([token])
        written.append(token)
    return "long", _text(written)


def _text(tokens: list[int]) -> str:
    return str(_vocabulary().tokenizer.decode_str(tokens))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether an answer may be this text. Raises InvalidGrammar."""
    matcher = compile_grammar(grammar, _vocabulary()).deep_copy()
    tokens = ids(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
