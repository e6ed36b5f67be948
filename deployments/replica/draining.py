"""Tells whether Serve is stopping this process's replica.

Serve 2.60 stops routing to a replica, waits until its requests have ended, and calls `__del__` only then: user
code is not told before. Serve's own object in this process knows from the first moment, and this module alone
reads it. Where it cannot be read the answer is no, and a draining replica still takes the requests that reach it.
"""

from __future__ import annotations

import sys


def serve_is_stopping() -> bool:
    """True from the moment Serve has asked this replica to shut down. Costs well under a microsecond."""
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    replicas = (getattr(actor, "_replica_impl", None) for actor in getattr(worker, "actors", {}).values())
    return any(getattr(replica, "_shutting_down", False) for replica in replicas)
