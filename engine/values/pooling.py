"""Pooling: the result that a request wants of its prompt instead of an answer, a state or the scores of tokens.

    prompt ── computed as for an answer: chunks, pages, cache ──▶ hidden state after its last token
                    embedding: that state, normed as for logits ◀──┤
    scores: softmax over the logits of a few tokens (yes, no) ◀────┘

An encoder computes a whole prompt in one step and keeps nothing of it. Its embedding is the first token's state or
the mean of all states, and its score comes from a classification head.

No token is sampled: the request ends with its prompt, and its only delta has the values.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_POOLED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Pooling:
    """The wanted result. Raises ValueError for invalid token ids, or too many."""

    token_ids: tuple[int, ...] = ()
    """Tokens whose probabilities of coming next are wanted; these sum to 1. Empty: the hidden state is wanted."""
    by_head: bool = False
    """Whether the score of an encoder's classification head is wanted instead."""

    def __post_init__(self) -> None:
        for token in self.token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"pooling must have token ids, got {token!r}")
        if len(self.token_ids) > MAX_POOLED_TOKENS:
            raise ValueError(
                f"pooling has {len(self.token_ids)} token ids, at most {MAX_POOLED_TOKENS} are allowed"
            )
