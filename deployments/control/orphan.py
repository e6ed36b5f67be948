"""Ends a replica's process when its raylet is gone, because no other process would then end or replace it.

Ray also ends its workers, but not always: a replica whose raylet was killed may stay, with its port, its GPU
and its memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time

logger = logging.getLogger(__name__)

_POLL_S = 0.5


def end_with_raylet() -> None:
    """End this process when the raylet that started it is gone.

    Does nothing in a process that no raylet started, such as in tests.
    """
    raylet = os.getppid()
    if os.environ.get("RAY_RAYLET_PID") == str(raylet):
        threading.Thread(target=_watch, args=(raylet,), name="raylet-watch", daemon=True).start()


def _watch(raylet: int) -> None:
    while os.getppid() == raylet:  # an orphan gets another parent
        time.sleep(_POLL_S)
    logger.error("the raylet (process %d) is gone, so this replica ends", raylet)
    os._exit(1)
