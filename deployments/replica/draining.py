"""Whether Serve is stopping the replica that this process is.

Serve 2.60 stops routing to a replica, waits until its requests have ended, and only then calls `__del__`: user
code hears nothing before. Serve's own object in this process knows from the first moment; it is asked here, and
only here. Where it cannot be asked the answer is no: a replica that drains then takes what still reaches it.
"""

from __future__ import annotations

import sys


def serve_is_stopping() -> bool:
    """True from the moment Serve has asked this replica to shut down. Costs well under a microsecond."""
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    replicas = (getattr(actor, "_replica_impl", None) for actor in getattr(worker, "actors", {}).values())
    return any(getattr(replica, "_shutting_down", False) for replica in replicas)
