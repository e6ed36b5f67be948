"""The version of Raydix, which only pyproject.toml states."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def raydix_version() -> str:
    """Return the version of the installed package; "unknown" in a source tree that was never installed."""
    try:
        return version("raydix")
    except PackageNotFoundError:
        return "unknown"
