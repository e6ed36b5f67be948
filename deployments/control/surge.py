"""Number of extra replicas that a change may start before it stops old ones, so that none is missing meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from deployments.config.placement import Placement, num_engines
from router.ray_internals import free_resources

AUTO_PERCENT = 20
"""As many as Serve replaces at a time anyway; Serve makes it at least one."""
Resources = Mapping[str, float]


def surge_percent(
    setting: int | str,
    needed: Resources,
    num_ranks: int = 1,
    free: Callable[[], Collection[Resources]] | None = None,
    *,
    num_stages: int = 1,
    placement: Placement = "pack",
) -> int:
    """Return Serve's `max_surge_percent`. Each stage of a replica needs `num_ranks` times `needed`, on one node.

    A replica that does not fit would wait for old ones to leave, which wait for it, so "auto" then means 0.
    """
    if isinstance(setting, int):
        return setting
    nodes = (free or free_resources)()
    room = [_num_stages(needed, node, num_ranks) for node in nodes]
    return AUTO_PERCENT if num_engines(room, num_stages, placement) else 0


def has_room(needed: Resources, there: Resources) -> bool:
    """Return whether `there` has as many resources as `needed`."""
    return all(there.get(name, 0.0) >= amount for name, amount in needed.items())


def _num_stages(needed: Resources, there: Resources, num_ranks: int) -> int:
    """Return the number of stages for which a node has room."""
    fitting = (int(there.get(name, 0.0) / (amount * num_ranks) + 1e-9) for name, amount in needed.items())
    return min(fitting, default=64)
