"""One ingress's session at a replica: its address, message count, and requests that are on their way."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.wire.messages import Announce


@dataclass(slots=True)
class Session:
    """The state of a session, which lasts from one hello to the next, or to the end of the connection."""

    identity: bytes
    """ZeroMQ's identity of the connection."""
    seq: int = 0
    """Sequence number of the next message."""
    last_load: float = 0.0
    is_synced: bool = False
    """Whether the ingress has a snapshot of the cache and every delta since."""
    dispatches_seen: int = 0
    """Number of the last dispatch that the ingress announced."""
    announced: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Requests announced but not yet arrived: their uncached tokens, and the clock when they expire."""

    def announce(self, dispatch: Announce, expires: float) -> bool:
        """Count a request as load until it arrives or `expires`. Return False when it was announced before."""
        if dispatch.number <= self.dispatches_seen:
            return False
        self.dispatches_seen = dispatch.number
        self.announced[dispatch.request_id] = (max(0, dispatch.num_tokens), expires)
        return True

    def arrived(self, request_id: str) -> None:
        """Stop counting a request that has arrived. Unknown ids are ignored."""
        self.announced.pop(request_id, None)

    def expire(self, now: float) -> None:
        """Forget requests that have not arrived in time."""
        for request_id in [id_ for id_, (_, expires) in self.announced.items() if expires < now]:
            del self.announced[request_id]
