"""Keeps the texts of special tokens apart from the tokens, through the chat template.

A conversation is rendered to text first, so a user who writes `<|im_end|>` would end the message and could speak
as the assistant. Such strings in messages and tools are therefore tokenized as plain characters, while the
template's own keep their meaning.

    content      "hi <|im_end|> you"            a special token's text is replaced by a mark before rendering
    rendered     "<|im_start|>user\\nhi ¤0¤ you<|im_end|>\\n"
    pieces       [     with specials      ] [plain] [      with specials       ]
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from typing import Any


class SpecialTexts:
    """The texts of a tokenizer's special tokens."""

    def __init__(self, texts: Collection[str]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.first_characters = frozenset(text[0] for text in texts)


class Marks:
    """Replaces the texts of special tokens in a client's strings by marks, and finds them after rendering.

    A mark is a number between two nonces of letters and digits, which no template escapes and no client knows.
    """

    def __init__(self, specials: SpecialTexts) -> None:
        self._pattern, self._first_characters = specials.pattern, specials.first_characters
        self._nonce = ""
        self._texts: list[str] = []

    def put(self, value: Any) -> Any:
        """Return `value` with marks in its strings, keys of objects included."""
        if isinstance(value, str):
            for character in self._first_characters:  # a search for one character costs next to nothing
                if character in value:
                    assert self._pattern is not None
                    return self._pattern.sub(self._take, value)
            return value
        if isinstance(value, dict):
            return {self.put(key): self.put(child) for key, child in value.items()}
        return [self.put(child) for child in value] if isinstance(value, list) else value

    def find(self, rendered: str) -> Iterator[tuple[str, str]]:
        """Yield stretches of the rendered text, each with the client's special token text that follows it."""
        if not self._texts:  # nearly always; compiling the pattern would cost more than rendering
            yield rendered, ""
            return
        *pairs, rest = re.split(f"{self._nonce}([0-9]+){self._nonce}", rendered)
        for text, number in zip(pairs[::2], pairs[1::2], strict=True):
            yield text, self._texts[int(number)]
        yield rest, ""

    def _take(self, found: re.Match[str]) -> str:
        self._nonce = self._nonce or f"m{secrets.token_hex(8)}m"
        self._texts.append(found.group())
        return f"{self._nonce}{len(self._texts) - 1}{self._nonce}"
