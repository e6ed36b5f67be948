"""Names of whole pages of KV, for memory outside of the radix tree: equal names stand for equal KV.

    key of page i = blake2b(namespace, tokens 0 .. (i + 1) * page_size)

The tree compares tokens, and a router's 64-bit hashes may collide, since they only advise. These names do neither:
two sequences with one key would be a collision of blake2b with 256 bits.

A resume point is named after the last page of its prefix (`key_at_end`), and after the tokens behind that page, if
there are any (`key_inside`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from cache.node import Namespace
from cache.prefix_hash import encoded, encoded_namespace


class PageKeys:
    """The keys of one sequence's whole pages, each computed when it is first asked for. O(page_size) each."""

    def __init__(self, namespace: Namespace, tokens: Sequence[int], page_size: int, first: int = 0) -> None:
        """Pages before `first` have no key here; skipping a page costs a tenth of computing its key. The
        tokens of requested pages must not change.
        """
        self.first = first
        self._tokens, self._page_size = tokens, page_size
        self._root = encoded_namespace(namespace)
        self._hash = blake2b(self._root, digest_size=32)
        self._hash.update(encoded(tokens[: first * page_size]))
        self._keys: list[bytes] = []

    def __getitem__(self, page: int) -> bytes:
        """Return the key of a page, which must be whole."""
        while self.first + len(self._keys) <= page:
            start = (self.first + len(self._keys)) * self._page_size
            self._hash.update(encoded(self._tokens[start : start + self._page_size]))
            self._keys.append(self._hash.digest())
        return self._keys[page - self.first]

    def before(self, page: int) -> bytes:
        """Return the key of the page before another one; before the first page, one of no page."""
        return self[page - 1] if page else blake2b(self._root, digest_size=32, person=b"no page").digest()


def key_inside(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the place that `tokens`, fewer than a page, lead to after the page of a key."""
    return blake2b(encoded(tokens), digest_size=32, key=before).digest() if tokens else before


def key_at_end(place: bytes, number: int) -> bytes:
    """Return the key of one of the pages of a resume point."""
    return place + number.to_bytes(4, "little")
