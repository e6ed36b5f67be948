"""Encodes parts of conversations so that their control tokens are exactly those that they spell.

Tokenizers nearly always do so by themselves. Otherwise text that does not spell a token became one, such as a
token that is matched after normalization, or a word of the vocabulary. Such text is cut until it becomes none. A
token may also have lost its first character to another added token before it; then it is encoded separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from deployments.api.conversation.control_tokens import ControlTokens, Spelled


class ControlGuard:
    """Checks the token ids that `encode` returns."""

    def __init__(self, encode: Callable[[str], list[int]], control: ControlTokens) -> None:
        """`encode` returns the ids of a text, control tokens included."""
        self._encode, self._control = encode, control
        # Some tokenizers written in Python find special tokens in no text.
        self._written = {text: token for text, token in control.id_of.items() if encode(text) == [token]}
        self._spelled = Spelled(self._written)

    def checked(self, text: str, ids: list[int]) -> list[int]:
        """Return `ids`, those of `text`, or others if their control tokens are not those that it spells."""
        spelled = [found.group() for found in self._spelled.find_all(text)]
        made = [token for token in ids if token in self._control.ids]
        if made == [self._written[found] for found in spelled] or self._are_as_spelled(made, spelled):
            return ids
        ids, end = [], 0
        for found in self._spelled.find_all(text):
            ids += [*self._without_control(text[end : found.start()]), self._written[found.group()]]
            end = found.end()
        return ids + self._without_control(text[end:])

    def _are_as_spelled(self, made: list[int], spelled: list[str]) -> bool:
        """Whether `made` has only the control tokens that are spelled, and all that the tokenizer must find."""
        all_spelled = Counter(self._written[found] for found in spelled)
        must = Counter(self._written[found] for found in spelled if found not in self._control.choosy)
        return must <= Counter(made) <= all_spelled

    def _without_control(self, text: str) -> list[int]:
        """Return token ids of `text` without control tokens. A character that is one by itself is omitted."""
        ids = self._encode(text) if text else []
        if self._control.ids.isdisjoint(ids):
            return ids
        if len(text) == 1:
            return [token for token in ids if token not in self._control.ids]
        middle = len(text) // 2
        return self._without_control(text[:middle]) + self._without_control(text[middle:])
