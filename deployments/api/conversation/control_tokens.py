"""Which tokens structure a conversation, so that only the chat template may write them.

These are all special tokens, wherever they are declared, and those of the other added tokens that the template
writes or that have the form of a control token (`<|fim_prefix|>`, `[TOOL_CALLS]`). Tokenizers also have added
tokens for ordinary text, such as Gemma's for runs of newlines and for HTML tags: these keep their meaning.

Models write some tokens themselves within their answers: the marks of reasoning and of tool calls. Clients send
answers back unchanged, so these stay in an assistant's content, unless they are special.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

SEARCHED_CHARS = 65_536
"""Characters of a text that are searched at a time."""
_CONTROL_FORM = re.compile(r"<[|｜].+[|｜]>|\[/?[A-Z][A-Z_]*\]", re.DOTALL)  # noqa: RUF001 - DeepSeek's bars


class ControlTokens:
    """The texts and ids of control tokens, and where texts spell them."""

    def __init__(
        self, ids: Mapping[str, int], answers: Collection[str] = (), choosy: Collection[str] = ()
    ) -> None:
        """`ids` are the tokens' ids by their texts; an assistant's content may hold `answers`. Tokenizers find
        `choosy` tokens only in some places where they are spelled: as whole words, or after normalization.
        """
        self.id_of = {text: token for text, token in ids.items() if text}
        self.choosy = frozenset(choosy)
        self.ids = frozenset(self.id_of.values())
        self._spelled = Spelled(self.id_of)
        self._spelled_in_answers = Spelled(self.id_of.keys() - set(answers))
        self._first_characters = frozenset(text[0] for text in self.id_of)
        self._last_characters = frozenset(text[-1] for text in self.id_of)
        self._outer_characters = tuple(sorted(self._first_characters | self._last_characters))
        self._beginnings = frozenset(text[:end] for text in self.id_of for end in range(1, len(text)))
        self._ends = frozenset(text[at:] for text in self.id_of for at in range(1, len(text)))
        self._longest = max(map(len, self.id_of), default=1) - 1  # characters that may begin a token

    def spelled(self, text: str, *, in_answer: bool = False) -> list[tuple[int, int]]:
        """Return the spans of a client's `text` that spell a control token, or may do so next to other text.

        The latter are its first characters if a token ends with them, and its last if one begins with them. White
        space around the text does not count, as templates strip it.
        """
        if not _has_any(self._outer_characters, text):
            return []
        spans = []
        if _has_any(self._first_characters, text):
            known = self._spelled_in_answers if in_answer else self._spelled
            spans = [found.span() for found in known.find_all(text)]
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        length = self._num_at_begin(text[begin : min(begin + self._longest, end)])
        if length and not (spans and spans[0][0] < begin + length):
            spans.insert(0, (begin, begin + length))
        length = self._num_at_end(text[max(end - self._longest, begin) : end])
        if length and not (spans and spans[-1][1] > end - length):
            spans.append((end - length, end))
        return spans

    def _num_at_begin(self, text: str) -> int:
        """Return how many characters at the beginning of `text` end a token; the most, if there are several."""
        if not _has_any(self._last_characters, text):
            return 0
        return next((length for length in range(len(text), 0, -1) if text[:length] in self._ends), 0)

    def _num_at_end(self, text: str) -> int:
        """Return how many characters at the end of `text` begin a token; the most, if there are several."""
        if not _has_any(self._first_characters, text):
            return 0
        return next((len(text) - at for at in range(len(text)) if text[at:] in self._beginnings), 0)

    def without_forged(self, text: str, foreign: Sequence[tuple[int, int]]) -> list[str]:
        """Cut `text` within each control token that is spelled by some of its `foreign` spans, which are in order.

        Cut after its first character, the text of a token is no longer that token. A token of a single character
        is omitted, because it cannot be spelled differently.
        """
        pieces, begin, at, span = [], 0, 0, 0
        while found := self._spelled.find(text, at):
            while span < len(foreign) and foreign[span][1] <= found.start():
                span += 1
            if span == len(foreign):
                break
            at = found.end()
            if foreign[span][0] < found.end():
                at = found.start() + 1
                pieces.append(text[begin : at if len(found.group()) > 1 else found.start()])
                begin = at
        return [*pieces, text[begin:]]


def _has_any(characters: Collection[str], text: str) -> bool:
    """Whether `text` has one of few `characters`: searches for single ones cost next to nothing."""
    for character in characters:  # noqa: SIM110 - a generator would cost more than the search
        if character in text:
            return True
    return False


def control_tokens(tokenizer: Any, template: str, answers: Collection[str]) -> ControlTokens:
    """Return a tokenizer's control tokens.

    `template` is the source of its chat templates; `answers` are texts that its model writes within answers.
    """
    added = {str(token): (token_id, token) for token_id, token in _added_tokens(tokenizer).items()}
    ids = {text: token_id for text, (token_id, token) in added.items() if _is_control(token, template)}
    specials = {text for text, (_, token) in added.items() if token.special}
    # Some special tokens of tokenizers written in Python are only in the vocabulary.
    for text in getattr(tokenizer, "all_special_tokens", []):
        specials.add(text)
        ids.setdefault(text, tokenizer.convert_tokens_to_ids(text))
    choosy = {text for text, (_, token) in added.items() if token.normalized or token.single_word}
    return ControlTokens(ids, set(answers) - specials, choosy)


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    found: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return found


def _is_control(token: Any, template: str) -> bool:
    text = str(token)
    if token.special or _CONTROL_FORM.fullmatch(text):
        return True
    return text in template and text.strip("▁ \t\r\n") != ""


class Spelled:
    """Finds some texts within others: the first that is there, and the longest of those that begin there.

    Texts that begin alike share that part of the pattern, so a text that nearly spells many of them costs no more
    than one that nearly spells one. A search covers little at a time, so that other threads need not wait for it.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self._pattern = re.compile(_alternatives(sorted(texts)) if texts else r"(?!)")
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str, at: int = 0) -> re.Match[str] | None:
        """Return the first match in `text` from `at` on."""
        while at < len(text):
            end = at + SEARCHED_CHARS
            found = self._pattern.search(text, at, end + self._longest)
            if found is not None and found.start() < end:  # a later one may extend beyond the searched part
                return found
            at = end
        return None

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches in `text`, each after the end of the one before."""
        at = 0
        while found := self.find(text, at):
            yield found
            at = found.end()


def _alternatives(texts: Sequence[str]) -> str:
    """Return the expression for sorted `texts`; if one is "", the others are optional."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        if text:
            groups.setdefault(text[0], []).append(text)
    branches = []
    for group in groups.values():
        shared = _common_beginning(group[0], group[-1])
        rest = [text[len(shared) :] for text in group]
        branches.append(re.escape(shared) + (_alternatives(rest) if len(rest) > 1 else ""))
    if not texts[0]:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _common_beginning(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]
