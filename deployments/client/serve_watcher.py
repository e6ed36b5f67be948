"""A `Watcher` over a Serve handle: `EngineReplica.watch`, called at the replica that the call names."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorDiedError

from deployments.client.replica_watch import ReplicaDied


class ServeWatcher:
    """Calls a model's replicas through Serve's handles, whose router is `router.ray_router.PrefixRouter`."""

    def __init__(self, handle_of: Callable[[str], Any]) -> None:
        """`handle_of` returns the handle of a replica's deployment."""
        self._handle_of = handle_of

    async def watch(self, replica: str, ingress_id: str) -> None:
        """Return when the replica ends the call. Raises ReplicaDied when its process is gone.

        A call that fails in another way, or is cancelled, is cancelled at the replica too: it may still be open
        there, and a replica that is being stopped waits for its calls.
        """
        # Serve 2.60 gives all handle calls of one context the same internal id, and routes only one of several
        # concurrent ones. In its own context each call has its own id.
        context = contextvars.Context()
        response = context.run(self._handle_of(replica).watch.remote, WatchedReplica(replica), ingress_id)
        try:
            await response
        except ActorDiedError:
            raise ReplicaDied("its process died") from None
        except BaseException:
            with contextlib.suppress(Exception):
                response.cancel()
            raise


class WatchedReplica:
    """The replica to which a call goes; the router reads it from the call's first argument."""

    def __init__(self, replica: str) -> None:
        self.watched_replica = replica
