"""Number of extra replicas that a change may start before it stops old ones, so that none is missing meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from router.ray_internals import free_resources

AUTO_PERCENT = 20
"""As many as Serve replaces at a time anyway; Serve makes it at least one."""
Resources = Mapping[str, float]


def surge_percent(
    setting: int | str,
    needed: Resources,
    num_ranks: int = 1,
    free: Callable[[], Collection[Resources]] | None = None,
) -> int:
    """Return Serve's `max_surge_percent`. A replica needs `num_ranks` times `needed`, on one node.

    A replica that does not fit would wait for old ones to leave, which wait for it, so "auto" then means 0.
    """
    if isinstance(setting, int):
        return setting
    nodes = (free or free_resources)()
    return AUTO_PERCENT if any(has_room(needed, node, num_ranks) for node in nodes) else 0


def has_room(needed: Resources, there: Resources, times: int = 1) -> bool:
    """Return whether `there` has `times` as many resources as `needed`."""
    return all(there.get(name, 0.0) >= amount * times for name, amount in needed.items())
