"""The key that a command sends to a server: from an environment variable, or as an option."""

from __future__ import annotations

import os

from deployments.cli.errors import UserError


def given_key(key: str | None, key_env: str | None, default_env: str) -> str | None:
    """Return the key, given or from a variable. Raises UserError if the named variable is not set."""
    if key is not None and key_env is not None:
        raise UserError("--key and --key-env cannot be combined: give one of them", 2)
    found = key if key is not None else os.environ.get(key_env or default_env)
    if key_env is not None and not found:
        raise UserError(f"--key-env {key_env}: this environment variable is not set or empty", 2)
    if found is not None and not (found and all(33 <= ord(char) <= 126 for char in found)):
        raise UserError("a key must have visible ASCII characters and no spaces", 2)
    return found
