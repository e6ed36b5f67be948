"""Helper for futures whose result may no longer be needed."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as seen, so that asyncio does not complain when no task waits for it."""
    if not future.cancelled():
        future.exception()
