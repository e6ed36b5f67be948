"""Prompt lookup: draft the tokens that followed the same n-gram earlier (Saxena 2023, "Prompt Lookup Decoding").

Summaries, edits and answers with quotations repeat their own text. Earlier places are found through hash chains,
as in LZ77 compressors (Ziv and Lempel 1977):

    tokens     5 8 2 9 4 5 8 2 7 5 8      the last two, 5 8, stood before positions 2 and 7
    heads      hash(5, 8) ─▶ 7
    earlier              7 ─▶ 2 ─▶ nothing
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.values.request import Request

_MOST_PLACES = 16
"""Maximum number of earlier places that are compared per draft, the latest first."""
_MOST_INDEXED = 4096
"""Maximum number of tokens indexed per call: a long prompt is indexed over several steps."""


class NgramDrafter:
    """Drafts from each request's own tokens. Constant work per token, bounded memory per request."""

    has_begun = False
    """Implements `Drafter.has_begun`."""

    def __init__(
        self, min_match: int = 2, max_match: int = 8, window: int = 16_384, most_places: int = _MOST_PLACES
    ) -> None:
        """See `Speculation` for the first arguments. `most_places`: how many earlier places are compared."""
        self._min_match, self._max_match, self._window = min_match, max_match, window
        self._most_places = most_places
        self._indexes: dict[str, _Index] = {}

    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        """Implement `Drafter.propose`."""
        return [self._draft(request, most) for request, most in zip(requests, max_tokens, strict=True)]

    def forget(self, request: Request) -> None:
        """Implement `Drafter.forget`."""
        self._indexes.pop(request.request_id, None)

    def _draft(self, request: Request, most: int) -> list[int]:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = _Index(self._min_match, min(self._window, max(request.longest, request.num_tokens)))
            self._indexes[request.request_id] = index
        if not index.take(request.tokens):
            return []
        place = index.find(request.tokens, self._max_match, self._most_places)
        return [] if place is None else _continued(request.tokens, place, most)


class _Index:
    """Earlier places of each n-gram of a growing list of tokens, within a window before its end.

    A place is the position after an n-gram: that of the token which followed it.
    """

    def __init__(self, n: int, window: int) -> None:
        self._n = n
        size = 1 << max(window - 1, 1).bit_length()
        self._mask = size - 1
        self._heads = array("i", bytes(4 * size))  # hash -> its latest place; 0 for none, as places are at least n
        self._earlier = array("i", bytes(4 * size))  # place modulo size -> the one before it of the same hash
        self._next = n

    def take(self, tokens: Sequence[int]) -> bool:
        """Index places before the end, the oldest first; return whether all are indexed."""
        n, mask, heads, earlier = self._n, self._mask, self._heads, self._earlier
        first = max(self._next, len(tokens) - mask)
        self._next = min(len(tokens), first + _MOST_INDEXED)
        for place in range(first, self._next):
            key = hash(tuple(tokens[place - n : place])) & mask
            earlier[place & mask] = heads[key]
            heads[key] = place
        return self._next == len(tokens)

    def find(self, tokens: Sequence[int], most: int, most_places: int) -> int | None:
        """Return the place before which `n` to `most` tokens, as many as possible, match the end; else None. Looks
        at up to `most_places` places.
        """
        end = len(tokens)
        if end < self._n:
            return None
        place = self._heads[hash(tuple(tokens[end - self._n :])) & self._mask]
        best, best_length = None, self._n - 1  # Other n-grams of the same hash match fewer tokens.
        for _ in range(most_places):
            if place <= max(end - self._mask, 0):  # There is no earlier place, or its entry was overwritten.
                break
            length = _num_equal(tokens, place, end, most)
            if length > best_length:
                best, best_length = place, length
                if length == most:
                    break
            place = self._earlier[place & self._mask]
        return best


def _num_equal(tokens: Sequence[int], place: int, end: int, most: int) -> int:
    """Count the tokens before `place` that equal those before `end`."""
    for length in range(min(most, place)):
        if tokens[place - 1 - length] != tokens[end - 1 - length]:
            return length
    return min(most, place)


def _continued(tokens: Sequence[int], place: int, most: int) -> list[int]:
    """Return the `most` tokens from `place` on; past the end, the draft repeats its own tokens."""
    period = len(tokens) - place
    draft = list(tokens[place : place + most])
    while len(draft) < most:
        draft.append(draft[-period])
    return draft
