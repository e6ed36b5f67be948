"""`raydix hash-key`: the hash of an API key, for the configuration."""

from __future__ import annotations

import secrets
import sys

from deployments.cli.errors import UserError
from deployments.config.tenants import hash_key

MIN_CHARS = 16
MAX_CHARS = 512


def run(*, from_stdin: bool) -> None:
    """Print the hash of the key on standard input, or a new key and its hash. Raises UserError for a bad key."""
    if from_stdin:
        print(hash_key(_checked(sys.stdin.readline(MAX_CHARS + 2).strip())))
        return
    key = f"rdx-{secrets.token_urlsafe(32)}"
    print(f"key   {key}\nhash  {hash_key(key)}")
    print("Give the key to the client; put the hash in tenants[].key_hashes or admin_key_hash.", file=sys.stderr)


def _checked(key: str) -> str:
    """Return a valid key. Short keys can be guessed from their hash; others cannot be sent in a header."""
    if not MIN_CHARS <= len(key) <= MAX_CHARS:
        raise UserError(f"a key has {MIN_CHARS} to {MAX_CHARS} characters, this one has {len(key)}")
    if not all(33 <= ord(char) <= 126 for char in key):
        raise UserError("a key has only visible ASCII characters and no spaces, so that a header can carry it")
    return key
