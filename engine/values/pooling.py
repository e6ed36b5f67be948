"""What a request can want of its prompt instead of an answer: the model's last state, or how likely tokens are.

    prompt ── computed as for an answer: chunks, pages, cache ──▶ hidden state after its last token
                    embedding: that state, normed as for logits ◀──┤
    scores: softmax over the logits of a few tokens (yes, no) ◀────┘

An encoder computes a whole prompt at once and keeps nothing of it; its embedding is the first token's state or the
mean of all, and its score that of a classification head.

No token is sampled: the request ends with its prompt, and its only delta has the values.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_POOLED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is wanted. Raises ValueError for token ids that are none, or too many."""

    token_ids: tuple[int, ...] = ()
    """Tokens of which one comes next: their probabilities are wanted, which sum to 1. Empty: the hidden state."""
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
