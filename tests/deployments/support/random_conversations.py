"""Draws conversations as clients send them: many begin alike, and most are an earlier one with another turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

Message = dict[str, str]

_WORDS = (
    "the", "Hello", "don't", "it's", "x1", "2024", "3.14", "naïve", "cafe\u0301", "Straße", "你好", "世界",
    "こんに", "🙂", "👩‍👩‍👧", "\u200b", "\ufeff", "\u00a0", "\u2028", "\u0000", "▁", "▁▁", "Ġ", "<0x0A>", "<",
    "<|", "|>", "<s", "[INST", "</", "{}", "```py", "\t", "e\u0301\u0302", "ﬁ", "Ⅷ", "İ", "\u0e33",
)  # fmt: skip
_BETWEEN = (" ", " ", " ", "  ", "\n", "\n\n", "\n\n\n", "", "\t", "\r\n")


class RandomConversations:
    """Conversations drawn with a seeded generator."""

    def __init__(self, draw: random.Random, tokens: Sequence[str]) -> None:
        """`tokens` are texts of added tokens, which messages contain now and then."""
        self._draw, self._tokens = draw, tokens
        self._systems = [self._text() for _ in range(5)]
        self._running: list[list[Message]] = []

    def take(self, count: int) -> Iterator[list[Message]]:
        """Yield conversations, of which at most a hundred are continued."""
        for _ in range(count):
            known = self._draw.random() < 0.8 and self._running
            messages = list(self._draw.choice(self._running)) if known else self._begun()
            if known and self._draw.random() < 0.1:
                at = self._draw.randrange(len(messages))
                messages[at] = {**messages[at], "content": self._text()}
            if messages and messages[-1]["role"] == "user":
                messages.append({"role": "assistant", "content": self._text()})
            messages.append({"role": "user", "content": self._text()})
            if len(messages) < 6:
                self._running = [*self._running[-99:], messages]
            yield messages

    def _begun(self) -> list[Message]:
        system = self._draw.random() < 0.5
        return [{"role": "system", "content": self._draw.choice(self._systems)}] if system else []

    def _text(self) -> str:
        parts = []
        for _ in range(self._draw.choice((0, 1, 1, 2, 4))):
            is_token = self._tokens and self._draw.random() < 0.02
            parts += [self._draw.choice(self._tokens if is_token else _WORDS), self._draw.choice(_BETWEEN)]
        return "".join(parts)
