"""One ingress's session at a replica: its address and the state of what was sent to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Knowledge:
    """An ingress's knowledge of a cache, or of a store of files."""

    knowledge: Literal["none", "current", "outdated"] = "none"
    """The extent of it: nothing, because no snapshot has begun; a part or all of it, with every
    change since; or it lacks a change that could not be sent.
    """
    snapshot: Iterator[int] | None = None
    """Rest of the snapshot to be sent; None when it has not begun or is complete."""
    wants_first: bool = False
    """Whether the ingress waits for the first part of a snapshot."""


@dataclass(slots=True)
class Session:
    """The state of a session, which lasts from one hello to the next, or to the end of the connection."""

    identity: bytes
    """ZeroMQ's identity of the connection."""
    hello_number: int = 0
    """Number of the hello with which it began; a late one of an earlier connection has a smaller number."""
    seq: int = 0
    """Sequence number of the next message."""
    last_load: float = 0.0
    cache: Knowledge = field(default_factory=Knowledge)
    store: Knowledge = field(default_factory=Knowledge)
    """Of the files from which the replica reads. An ingress asks one replica of those that share them."""
    dispatches_seen: int = 0
    """Number of the last request that came from the ingress."""
