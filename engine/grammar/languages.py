"""Answers questions about the texts of a small grammar by following it with a vocabulary of single bytes.

llguidance itself gives the answers, so they are true of its own dialect of regular expressions.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 200_000,  # about 14 ms of a mask
    "step_max_items": 50_000,  # about 3 ms of a mask
    "max_lexer_states": 50_000,  # at most 64 MB, shared by all requests with the grammar
    "verbose_errors": False,
}
"""Limits of llguidance for any grammar."""
_END = 256
_MOST_STATES = 4096
"""Most states that are examined for the texts of one pattern, some 10 µs each."""


def texts_of_pattern(pattern: str, most: int) -> list[str] | None:
    """Return the texts that a pattern of a JSON schema matches; None if there are more than `most`, they take too
    long to find, or the pattern is not valid.
    """
    matcher = _matcher("start: %json " + json.dumps({"type": "string", "pattern": pattern}))
    if "Regex is empty" in matcher.get_error():
        return []
    found: list[str] = []
    open_states = [(b"", matcher)]
    for _ in range(_MOST_STATES):
        if not open_states:
            return found
        written, matcher = open_states.pop()
        followers = [] if matcher.is_error() else _allowed(matcher)
        if matcher.is_error() or len(found) + len(open_states) + len(followers) > most:  # each leads to some text
            return None
        for byte in followers:
            if byte == _END:
                found.append(json.loads(written))
            else:
                after = matcher.deep_copy()
                after.consume_token(byte)
                open_states.append((written + bytes([byte]), after))
    return None


def contradicts_itself(schema: object) -> bool:
    """Whether no value matches a JSON schema without references. False if llguidance does not find that out."""
    return "Unsatisfiable schema" in _matcher("start: %json " + json.dumps(schema)).get_error()


def is_empty(terminal: str, definitions: str) -> bool:
    """Whether a terminal in Lark's syntax, which may refer to `definitions`, matches no text at all."""
    matcher = _matcher(f"start: RAYDIX_TRIED\nRAYDIX_TRIED: {terminal}\n{definitions}")
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error().startswith("NoExtension")


def _allowed(matcher: LLMatcher) -> list[int]:
    """Return the bytes that may follow, the largest first, and `_END` before them."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return [byte for byte in range(_END, -1, -1) if bits >> byte & 1]


def _matcher(lark: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    grammar = LLMatcher.grammar_from_lark(lark)
    return LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=LLParserLimits(**LIMITS))


@cache
def _bytes_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


class _Bytes:
    """A tokenizer in the form that llguidance needs: each byte is a token, and one more is the end."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_END)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
