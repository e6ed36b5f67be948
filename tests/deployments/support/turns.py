"""An event loop that counts its turns, so that a test can interfere at each of them."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class CountedSelector(selectors.DefaultSelector):
    """Waits for the events of an event loop, once in each of its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_turns = 0
        self.actions: dict[int, list[Callable[[], None]]] = {}

    def select(self, timeout: float | None = None) -> Any:
        self.num_turns += 1
        actions = self.actions.pop(self.num_turns, [])
        for action in actions:
            action()
        return super().select(0 if actions else self.seconds_to_wait(timeout))

    def seconds_to_wait(self, timeout: float | None) -> float | None:
        """Return how long to wait when the loop would wait `timeout` seconds; None: until something happens."""
        return timeout


class TurnLoop(asyncio.SelectorEventLoop):
    """An event loop whose turns have numbers."""

    def __init__(self, selector: CountedSelector | None = None) -> None:
        self._counted = selector or CountedSelector()
        super().__init__(self._counted)

    @property
    def num_turns(self) -> int:
        """Number of turns begun."""
        return self._counted.num_turns

    def at_turn(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` before the callbacks of the turn with this number."""
        self._counted.actions.setdefault(number, []).append(action)


def turns() -> TurnLoop:
    """Return the running event loop, which counts its turns."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, TurnLoop)
    return loop
