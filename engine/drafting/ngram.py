"""Prompt lookup: what followed the same tokens the last time (Saxena 2023, "Prompt Lookup Decoding").

Summaries, edits and answers that quote repeat their own text. Earlier places are found through hash chains, as
LZ77 compressors find theirs (Ziv and Lempel 1977):

    tokens     5 8 2 9 4 5 8 2 7 5 8      the last two, 5 8, stood before positions 2 and 7
    heads      hash(5, 8) ─▶ 7
    earlier              7 ─▶ 2 ─▶ nothing
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.request import Request

_MOST_PLACES = 16
"""Earlier places compared per guess, the latest first."""
_MOST_INDEXED = 4096
"""Tokens taken into an index per call: a long prompt is worked off over several steps."""


class NgramDrafter:
    """Guesses from each request's own tokens. Constant work per token, bounded memory per request."""

    def __init__(self, min_match: int = 2, max_match: int = 8, window: int = 16_384) -> None:
        """See `Speculation` for the arguments."""
        self._min_match, self._max_match, self._window = min_match, max_match, window
        self._indexes: dict[str, _Index] = {}

    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        """Implement `Drafter.propose`."""
        return [self._guess(request, most) for request, most in zip(requests, max_tokens, strict=True)]

    def forget(self, request: Request) -> None:
        """Implement `Drafter.forget`."""
        self._indexes.pop(request.request_id, None)

    def _guess(self, request: Request, most: int) -> list[int]:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = _Index(self._min_match, min(self._window, max(request.longest, request.num_tokens)))
            self._indexes[request.request_id] = index
        if not index.take(request.tokens):
            return []
        place = index.find(request.tokens, self._max_match)
        return [] if place is None else _continued(request.tokens, place, most)


class _Index:
    """Where each n-gram of a growing list of tokens stood before, within a window of its end.

    A place is the position after an n-gram: that of the token which followed it.
    """

    def __init__(self, n: int, window: int) -> None:
        self._n = n
        size = 1 << max(window - 1, 1).bit_length()
        self._mask = size - 1
        self._heads = array("i", bytes(4 * size))  # hash: its latest place; 0 is none, as n-grams end after it
        self._earlier = array("i", bytes(4 * size))  # place, modulo the size: the one before it of the same hash
        self._next = n

    def take(self, tokens: Sequence[int]) -> bool:
        """Enter all places before the end, the oldest first; whether all have been."""
        n, mask, heads, earlier = self._n, self._mask, self._heads, self._earlier
        first = max(self._next, len(tokens) - mask)
        self._next = min(len(tokens), first + _MOST_INDEXED)
        for place in range(first, self._next):
            key = hash(tuple(tokens[place - n : place])) & mask
            earlier[place & mask] = heads[key]
            heads[key] = place
        return self._next == len(tokens)

    def find(self, tokens: Sequence[int], most: int) -> int | None:
        """The place before which the most tokens, `n` to `most`, are those at the end; the latest among equals."""
        end = len(tokens)
        if end < self._n:
            return None
        place = self._heads[hash(tuple(tokens[end - self._n :])) & self._mask]
        best, best_length = None, self._n - 1  # other n-grams of the same hash agree in fewer
        for _ in range(_MOST_PLACES):
            if place <= max(end - self._mask, 0):  # none, or overwritten since
                break
            length = _num_equal(tokens, place, end, most)
            if length > best_length:
                best, best_length = place, length
                if length == most:
                    break
            place = self._earlier[place & self._mask]
        return best


def _num_equal(tokens: Sequence[int], place: int, end: int, most: int) -> int:
    """How many tokens before `place` equal those before `end`."""
    for length in range(min(most, place)):
        if tokens[place - 1 - length] != tokens[end - 1 - length]:
            return length
    return min(most, place)


def _continued(tokens: Sequence[int], place: int, most: int) -> list[int]:
    """The `most` tokens from `place` on; past the end, the guess's own: what repeats goes on repeating."""
    period = len(tokens) - place
    guess = list(tokens[place : place + most])
    while len(guess) < most:
        guess.append(guess[-period])
    return guess
