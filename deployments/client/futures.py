"""Futures whose result may be of no interest any more."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as seen, so that asyncio does not complain when no task waits for it any more."""
    if not future.cancelled():
        future.exception()
