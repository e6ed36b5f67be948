"""Explains why a server cannot be reached, and what to do."""

from __future__ import annotations

import httpx

from deployments.cli.errors import one_line


def unreachable(url: str, error: httpx.HTTPError) -> str:
    """Return the message for a request to `url` that had no answer."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{url} is not the URL of a server: expected one such as http://127.0.0.1:8000"
    return f"cannot reach {url} ({one_line(error)}): is `raydix serve` running there?"
