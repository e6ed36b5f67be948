"""Waits for what a test has caused, for as long as a very slow machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

PATIENCE_S = 180.0
"""How long a test waits before it gives up."""


def wait_until(
    condition: Callable[[], bool], timeout_s: float = PATIENCE_S, state: Callable[[], object] = lambda: ""
) -> None:
    """Poll until `condition` holds. A failed connection is no answer; `state` explains a failure."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (httpx.HTTPError, ValueError):
            pass
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s; {state()}"
        time.sleep(0.1)
