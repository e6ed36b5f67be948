"""One ingress's session at a replica's wire: where to send, what was sent, and which requests are on their way."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.wire.messages import Announce


@dataclass(slots=True)
class Session:
    """From one hello to the next, or to the end of the connection."""

    identity: bytes
    """ZeroMQ's name of the connection."""
    seq: int = 0
    """Of the next message."""
    last_load: float = 0.0
    is_synced: bool = False
    """Whether it has a snapshot of the cache, and every delta since."""
    dispatches_seen: int = 0
    """Number of the last dispatch it told of."""
    coming: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Requests dispatched and not here yet: uncached tokens, and until when they count."""

    def announce(self, dispatch: Announce, expires: float) -> bool:
        """A request is on its way; it counts as load until it is here or `expires`. False: told before."""
        if dispatch.number <= self.dispatches_seen:
            return False
        self.dispatches_seen = dispatch.number
        self.coming[dispatch.request_id] = (max(0, dispatch.num_tokens), expires)
        return True

    def arrived(self, request_id: str) -> None:
        """It is here, or will not come. Unknown ids are no error."""
        self.coming.pop(request_id, None)

    def expire(self, now: float) -> None:
        """Forget what has not arrived in time."""
        for request_id in [id_ for id_, (_, expires) in self.coming.items() if expires < now]:
            del self.coming[request_id]
