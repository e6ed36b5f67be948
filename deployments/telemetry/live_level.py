"""The level of what a process logs, which a `user_config` of its deployment can change while it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deployments.config.faults import first_fault
from deployments.config.live import LIVE_IN_OTHERS, check_live
from deployments.config.settings import LogSettings

logger = logging.getLogger("ray.serve")


class LiveLevel:
    """The level of Serve's logger, through which everything here is logged. Make it once Serve has set it up."""

    def __init__(self) -> None:
        self._usual = logger.level
        self._was_told = False

    def set(self, level: str | None) -> None:
        """Set the level; None: as at the start."""
        logger.setLevel(level or self._usual)

    def take_over(self, user_config: Mapping[str, Any] | None) -> None:
        """Set the level that the `user_config` of engines or of the hub says.

        Raises ValueError for a wrong one at the start of a process. One that runs keeps its level, because Serve would
        end it after an exception.
        """
        try:
            self.set(_level(user_config or {}))
        except ValueError as error:
            if not self._was_told:
                raise
            logger.error("this process keeps its settings, as new ones are wrong: %s", error)
        self._was_told = True


def _level(user_config: Mapping[str, Any]) -> str | None:
    check_live(user_config, LIVE_IN_OTHERS)
    try:
        given = LogSettings.model_validate(user_config.get("logging", {}))
    except ValidationError as error:
        raise ValueError(f"user_config: logging.{first_fault(error)}") from None
    return given.level if "level" in given.model_fields_set else None
