"""The load that a simulated replica reports to ingresses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A replica's load at a moment."""

    time: float
    waiting_tokens: float
    """Uncached prompt tokens that wait, as estimated when their requests arrived."""
    prefill_ends: float
    """Time at which the current prefill ends."""
    num_running: int
    num_decoding: int
    pages_free: int
    eviction_age: float | None
    """Time since the last use of the next page to be evicted; None while pages are free."""
    num_transfers: int = 0
    """Transfers from and to it."""
