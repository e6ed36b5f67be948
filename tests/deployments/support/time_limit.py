"""Run an asynchronous scenario, for no longer than even a slow machine needs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError when the scenario takes longer than two minutes."""
    asyncio.run(asyncio.wait_for(scenario, 120))
