"""Follows context-free grammars with xgrammar, whose time for a token seldom grows with the answer.

It matches characters, without a lexer between them and the rules. `engine.grammar.ebnf` writes grammars for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine.base.errors import InvalidGrammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class XGrammarCompiler:
    """Compiles grammars in xgrammar's syntax for one vocabulary. Importing it takes half a second where torch and
    transformers are imported already, and seconds elsewhere.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        """`tokenizer` has each token's bytes. Special tokens have none, so no text contains them."""
        import xgrammar

        num_words = -(-tokenizer.vocab_size // 32)
        tokens = [_text(tokenizer, token) for token in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(
            tokens,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=32 * num_words,
            stop_token_ids=list(tokenizer.eos_tokens),
        )
        # The caller keeps compiled grammars and provides the thread.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._ends = _mask(num_words, tokenizer.eos_tokens)

    def compile(self, ebnf: str, root: str) -> XGrammarMatcher:
        """Return a matcher in its initial state. Raises InvalidGrammar."""
        import xgrammar

        try:
            compiled = self._compiler.compile_grammar(ebnf, root_rule_name=root)
        except RuntimeError as error:
            raise InvalidGrammar(f"xgrammar cannot compile it: {_first_line(error)}") from None
        return XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._ends)


class XGrammarMatcher:
    """Implements `engine.grammar.matcher.GrammarMatcher`."""

    def __init__(self, matcher: Any, ends: bytes, error: str = "") -> None:
        """`matcher`: xgrammar's. `ends`: the mask that allows only an end."""
        self._matcher, self._ends, self._error = matcher, ends, error

    def deep_copy(self) -> XGrammarMatcher:
        """Implement `GrammarMatcher`."""
        return XGrammarMatcher(self._matcher.fork(), self._ends, self._error)

    def compute_bitmask(self) -> bytes:
        """Implement `GrammarMatcher`."""
        if self._matcher.is_terminated():
            return self._ends
        mask = np.zeros((1, len(self._ends) // 4), dtype=np.int32)
        if not self._error:
            try:
                self._matcher.fill_next_token_bitmask(mask)
            except RuntimeError as error:  # for example: rules are nested too deeply
                self._error = _first_line(error)
                mask[:] = 0
        return mask.astype("<i4", copy=False).tobytes()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Implement `GrammarMatcher`."""
        try:
            for count, token in enumerate(tokens):
                if self._error or self._matcher.is_terminated() or not self._matcher.accept_token(token):
                    return count
        except RuntimeError as error:
            self._error = _first_line(error)
            return count
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        """Implement `GrammarMatcher`."""
        if not self._error:
            self._matcher.rollback(num_tokens)
        return not self._error

    def is_accepting(self) -> bool:
        """Implement `GrammarMatcher`."""
        return not self._error and (self._matcher.is_completed() or self._matcher.is_terminated())

    def is_error(self) -> bool:
        """Implement `GrammarMatcher`."""
        return bool(self._error)

    def get_error(self) -> str:
        """Implement `GrammarMatcher`."""
        return self._error


def _text(tokenizer: LLTokenizer, token: int) -> bytes:
    """Return the bytes that a token adds to a text; none for special tokens and unused ids."""
    text = tokenizer.decode_bytes([token])
    is_none = tokenizer.is_special_token(token) or text == b"<[%d]>" % token  # llguidance's text of such an id
    return b"" if is_none else text


def _mask(num_words: int, tokens: list[int]) -> bytes:
    mask = np.zeros(32 * num_words, dtype=np.uint8)
    mask[tokens] = 1
    return np.packbits(mask, bitorder="little").tobytes()


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].rpartition("] ")[2]
