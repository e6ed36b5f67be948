"""One ingress's session at a replica: its address and what was sent to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Knowledge:
    """What an ingress was told of a cache, or of a store of files."""

    knowledge: Literal["none", "current", "outdated"] = "none"
    """What the ingress knows of it: nothing, as no snapshot has begun; a part or all of it, with every
    change since; or it lacks a change that could not be sent.
    """
    snapshot: Iterator[int] | None = None
    """What is still to be sent of the snapshot; None when it has not begun or is whole."""
    wants_anew: bool = False
    """Whether the part of a snapshot that the ingress waits for is the first."""


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
    cache: Knowledge = field(default_factory=Knowledge)
    store: Knowledge = field(default_factory=Knowledge)
    """Of the files from which the replica reads. An ingress asks one replica of those that share them."""
    dispatches_seen: int = 0
    """Number of the last request that came from the ingress."""
