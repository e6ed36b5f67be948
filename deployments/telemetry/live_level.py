"""The log level of a process, which can change while it runs.

An ingress and the hub read it in their `user_config`, and the hub sends it to engines when they push metrics,
because Serve briefly removes a replica that it reconfigures from its list, and an engine would then receive no
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from deployments.config.faults import first_fault
from deployments.config.live import LIVE_IN_HUB, check_live
from deployments.config.settings import LogSettings

logger = logging.getLogger("ray.serve")


class LiveLevel:
    """The level of Serve's logger, through which all logs here go. Make it after Serve has set up the logger."""

    def __init__(self) -> None:
        self._usual = logger.level
        self.told: str | None = None
        """The level that was set last; None: as at the start."""

    def set(self, level: str | None) -> None:
        """Set the level; None: as at the start."""
        if level != self.told:
            logger.setLevel(level or self._usual)
            self.told = level

    def take_over(self, user_config: Mapping[str, Any]) -> None:
        """Set the level in the hub's `user_config`. Raises ValueError for a wrong one."""
        check_live(user_config, LIVE_IN_HUB)
        try:
            given = LogSettings.model_validate(user_config.get("logging", {}))
        except ValidationError as error:
            raise ValueError(f"user_config: {first_fault(error, 'logging')}") from None
        self.set(given.level if "level" in given.model_fields_set else None)


class Reconfigured:
    """Applies each `user_config` of a process that Serve starts and reconfigures."""

    def __init__(self, take_over: Callable[[Mapping[str, Any]], None]) -> None:
        """`take_over` raises ValueError for a wrong one, and then has changed nothing."""
        self._take_over, self._has_begun = take_over, False
        self.is_refused = False
        """Whether the process keeps its previous settings, because the last ones are wrong."""

    def __call__(self, user_config: Mapping[str, Any] | None) -> None:
        """Raises ValueError for a wrong one at the start. A running process keeps its previous settings, because
        Serve would end it after an exception.
        """
        try:
            self._take_over(user_config or {})
            self.is_refused = False
        except ValueError as error:
            if not self._has_begun:
                raise
            self.is_refused = True
            logger.error("this process keeps its current settings, because the new ones are wrong: %s", error)
        self._has_begun = True
