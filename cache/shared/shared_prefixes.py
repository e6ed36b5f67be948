"""Prefixes that all namespaces of a model share: the operator's text in front of all prompts.

A prompt that begins with one belongs to the prefix's own namespace up to its end, and to that of its request after
it. So the prefix is computed and held once for all namespaces, and the tokens after it are as separate as ever:

    tokens     | 0 ............. length | length ........... |
    namespace    without a salt           with the request's

Engines and routers find the same length for the same tokens, so their blocks have the same hashes. Only whole
blocks and whole pages are shared: a prefix is used up to the last place where both end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cache.node import Namespace
from cache.prefix_hash import block_hashes, gate_root, prefix_root


class SharedPrefixes:
    """The shared prefixes of one model. Lookups cost O(prefixes + tokens of the longest)."""

    def __init__(
        self, page_size: int = 1, block_tokens: int | None = None, prefixes: Iterable[Sequence[int]] = ()
    ) -> None:
        """`page_size` and `block_tokens` are those of the engines, in tokens."""
        self.unit = math.lcm(page_size, block_tokens or 1)
        """A shared prefix is cut to a multiple of this, in tokens."""
        self._by_length: list[list[int]] = []  # cut to multiples of `unit`, the longest first
        for token_ids in prefixes:
            self.add(token_ids)

    def add(self, token_ids: Sequence[int]) -> int:
        """Share the beginning of `token_ids` and return its length, 0 if there is not enough. Idempotent."""
        prefix = list(token_ids[: len(token_ids) // self.unit * self.unit])
        if prefix and prefix not in self._by_length:
            self._by_length.append(prefix)
            self._by_length.sort(key=len, reverse=True)
        return len(prefix)

    def length(self, namespace: Namespace, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` are looked up in the prefixes' own namespace rather than in `namespace`:
        0 if that is the same.
        """
        return 0 if namespace == own_namespace(namespace) else self.longest(token_ids)

    def longest(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest prefix that `token_ids` begin with and exceed; 0 if there is none."""
        for prefix in self._by_length:
            length = len(prefix)
            is_longer = length < len(token_ids) and prefix[-1] == token_ids[length - 1]
            if is_longer and list(token_ids[:length]) == prefix:
                return length
        return 0

    def chain(self, namespace: Namespace, token_ids: Sequence[int], block_tokens: int) -> list[int]:
        """Return the hashes of the blocks of `token_ids`, as `block_hashes` does. O(tokens)."""
        length = self.length(namespace, token_ids)
        if not length:
            return block_hashes(token_ids, prefix_root(namespace), block_tokens)
        shared = block_hashes(token_ids[:length], prefix_root(own_namespace(namespace)), block_tokens)
        return shared + block_hashes(token_ids[length:], gate_root(shared[-1], namespace), block_tokens)

    def seed(self, namespace: Namespace, token_ids: Sequence[int], chain: Sequence[int], block_tokens: int) -> int:
        """Return the hash from which the `chain` of `token_ids` continues with the tokens after its last block."""
        if not chain:
            return prefix_root(namespace)
        if len(chain) * block_tokens == self.length(namespace, token_ids):
            return gate_root(chain[-1], namespace)
        return chain[-1]


def own_namespace(namespace: Namespace) -> Namespace:
    """Return the namespace that shared prefixes of the same model lie in."""
    return namespace._replace(salt="", group=0)
