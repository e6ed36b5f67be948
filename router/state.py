"""State that one process keeps for each fleet that it routes to: the replicas' state and the placer that reads it.

Serve's router runs in another thread than the ingress's code, and its class is pickled by value, so the globals of
its module are a private copy. Both import this module by name, so both get the same state from `router_state`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from router.fleet import Fleet
from router.placer import Placer, PlacerSettings


@dataclass(frozen=True, slots=True)
class RouterState:
    """One model's replicas and the placer of its requests. Both are thread-safe."""

    fleet: Fleet
    placer: Placer


class SettingsDiffer(ValueError):
    """The state of a fleet was made with other settings than the caller asks for."""

    def __init__(self, message: str, state: RouterState) -> None:
        super().__init__(message)
        self.state = state
        """The existing state."""


_states: dict[tuple[str, str], RouterState] = {}
"""(application, fleet) -> this process's state."""
_states_lock = threading.Lock()


def router_state(app: str, name: str, settings: PlacerSettings) -> RouterState:
    """Return this process's state of the fleet called `name`, which the first call makes.

    Raises SettingsDiffer when it was made with other settings than the placer can change while it runs: a process
    places all requests by the same settings.
    """
    with _states_lock:
        state = _states.get((app, name))
        if state is None:
            fleet = Fleet()
            state = _states[app, name] = RouterState(fleet, Placer(fleet, settings))
    if state.placer.settings.at_start != settings.at_start:
        raise SettingsDiffer(
            f"this process places requests for {app}#{name} with {state.placer.settings}, so it cannot "
            f"place them with {settings}; restart it to change them",
            state,
        )
    return state
