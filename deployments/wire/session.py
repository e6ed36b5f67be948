"""One ingress's session at a replica: its address and what was sent to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Session:
    """The state of a session, which lasts from one hello to the next, or to the end of the connection."""

    identity: bytes
    """ZeroMQ's identity of the connection."""
    hello_number: int = 0
    """Number of the hello with which it began; an earlier connection's, arriving late, has a smaller one."""
    seq: int = 0
    """Sequence number of the next message."""
    last_load: float = 0.0
    is_synced: bool = False
    """Whether the ingress has a snapshot of the cache and every delta since."""
    dispatches_seen: int = 0
    """Number of the last request that came from the ingress."""
