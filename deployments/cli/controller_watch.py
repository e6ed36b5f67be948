"""Watches whether Serve's controller still answers `raydix serve`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from deployments.cli.errors import UserError

WATCH_S = 2.0
"""Seconds between two checks that Ray and Serve still run."""
CONTROLLER_S = 120.0
"""Seconds without an answer of Serve's controller after which it counts as gone. Ray restarts a dead one."""


class Gone(UserError):
    """Ray or Serve has ended, so this server must end too."""


class ControllerWatch:
    """Asks Serve's controller for its applications. It has a thread for this: the controller may not answer."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        """`ask` returns whether there are applications, and may raise anything."""
        self._ask, self._has_applications = ask, True
        self._closed = threading.Event()
        self._num_checks = 0
        """Since its last answer. Time would also count pauses of this process, in which it asks nothing."""
        threading.Thread(target=self._ask_on, daemon=True).start()

    def check(self) -> None:
        """Raise Gone when the controller or all applications are gone. Call it every `WATCH_S`."""
        self._num_checks += 1
        if self._num_checks * WATCH_S > CONTROLLER_S:
            raise Gone(f"Serve's controller has not answered for {CONTROLLER_S:.0f} s; start the server again")
        if not self._has_applications:
            raise Gone("all applications were deleted from Serve, so nothing is left to serve")

    def close(self) -> None:
        """Ask no more. Call it before Ray is shut down, because asking Serve without Ray starts another Ray."""
        self._closed.set()

    def _ask_on(self) -> None:
        while not self._closed.is_set():
            with suppress(Exception):  # The controller is restarting, or gone.
                self._has_applications = self._ask()
                self._num_checks = 0
            self._closed.wait(2 * WATCH_S)
