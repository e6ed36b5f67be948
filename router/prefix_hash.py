"""The placement key of a prompt: a hash of its first tokens, the same in every process and on every machine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash


def prefix_root(model: str, salt: str = "") -> bytes:
    """What hashes of prefixes begin with: they are shared within one (model, salt) only. 8 bytes."""
    digest = xxhash.xxh3_64()
    for part in (model, salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little"))  # lengths keep ("ab", "c") and ("a", "bc") apart
        digest.update(encoded)
    return digest.digest()


def prefix_key(token_ids: Sequence[int], root: bytes) -> bytes:
    """Hash of `token_ids`, a prompt's first tokens, under `root`. 8 bytes. Token ids fit 64 bits."""
    return xxhash.xxh3_64_digest(root + array("q", token_ids).tobytes())
