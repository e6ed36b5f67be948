"""Runs an asynchronous scenario within a time that suffices for a slow machine, too."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario. Raises TimeoutError when it takes longer than two minutes."""
    asyncio.run(asyncio.wait_for(scenario, 120))
