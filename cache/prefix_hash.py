"""Hashes of prefixes: chained over blocks, and the same in every process and on every machine.

    root ──▶ h0 ──▶ h1 ──▶ h2          h_i = xxh3_64(tokens of block i, seed = h_(i-1)),  h_(-1) = root
          block 0  block 1  block 2

A block is a run of `block_tokens` tokens that begins at a multiple of `block_tokens`. Its hash depends on all
blocks before it, so one number stands for a whole prefix. Among n different prefixes two share a hash with
probability n² / 2^65, which is one in 2 million for 4 million blocks.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from cache.node import Namespace

try:
    from xxhash import xxh3_64_intdigest as _digest
except ImportError:  # an engine without a router, so no other process compares its hashes

    def _digest(content: bytes, seed: int = 0) -> int:  # type: ignore[misc]
        """Replace xxh3_64; eight times as slow."""
        keyed = blake2b(content, digest_size=8, key=seed.to_bytes(8, "little"))
        return int.from_bytes(keyed.digest(), "little")


@lru_cache(maxsize=1024)  # Nearly all requests have one of a few namespaces.
def prefix_root(namespace: Namespace) -> int:
    """Return the 64-bit hash that begins the chains of a namespace, so that no two namespaces share hashes."""
    return int(_digest(encoded_namespace(namespace)))


def encoded_namespace(namespace: Namespace) -> bytes:
    """Encode a namespace; no two have the same encoding, and no encoding begins with another."""
    parts = [part.encode() for part in (namespace.model, namespace.adapter, namespace.salt)]
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    return b"".join([len(part).to_bytes(4, "little") + part for part in parts])


def gate_root(last_hash: int, namespace: Namespace) -> int:
    """Return the 64-bit hash from which a namespace's chains continue after a shared prefix, whose last block has
    `last_hash`.
    """
    return int(_digest(prefix_root(namespace).to_bytes(8, "little"), seed=last_hash))


def block_hashes(token_ids: Sequence[int], root: int, block_tokens: int, start: int = 0) -> list[int]:
    """Return the 64-bit hash of each whole block of `token_ids[start:]`; a partial last block has none.

    `root` is the chain's hash at `start`: the namespace's root at 0, else the hash of the block that ends at
    `start`. A chain can be continued: if `chain` is the first k > 0 hashes of `ids`, all of them are
    `chain + block_hashes(ids, chain[-1], n, k * n)`. O(len(token_ids) - start): 0.4 ms for 32,768 ids. Raises
    OverflowError for ids that do not fit 32 bits with sign, ValueError for a block of no tokens.
    """
    if block_tokens < 1:
        raise ValueError(f"a block must have at least 1 token, got {block_tokens}")
    num_blocks = max(len(token_ids) - start, 0) // block_tokens
    content = encoded(token_ids[start : start + num_blocks * block_tokens])
    size, previous, hashes = 4 * block_tokens, root, []
    for begin in range(0, len(content), size):
        previous = _digest(content[begin : begin + size], seed=previous)
        hashes.append(previous)
    return hashes


def prefix_key(token_ids: Sequence[int], root: int) -> int:
    """Return one 64-bit hash under `root` of all of `token_ids`, a prompt's first tokens whole blocks or not."""
    return int(_digest(encoded(token_ids), seed=root))


def encoded(token_ids: Sequence[int]) -> bytes:
    """Encode as little-endian 32-bit integers. Raises OverflowError for ids that do not fit 32 bits with sign."""
    if isinstance(token_ids, array) and token_ids.typecode == "i" and sys.byteorder == "little":
        return token_ids.tobytes()
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise OverflowError(f"token ids must fit in 32 bits with a sign: {error}") from None
