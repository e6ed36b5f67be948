"""Makes one call of chosen functions fail, so that a test can try every step of a scenario."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import pytest

When = Literal["before", "after"]
"""Whether the function that fails has done its work."""


class Fault(Exception):
    """The exception that nothing expects."""


class Faults:
    """Counts the calls of functions from `arm` on, and makes one of them fail."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        when: When,
        *owners_and_names: tuple[Any, str],
        error: Callable[[str], Exception] = Fault,
    ) -> None:
        """`owners_and_names` are the classes (or objects) and the names of their methods; `error` is raised."""
        self._error = error
        self.failed: str | None = None
        """The function whose call failed; None while none has."""
        self._when, self._remaining = when, 0
        for owner, names in owners_and_names:
            for name in names.split():
                monkeypatch.setattr(owner, name, self._watched(owner, name))

    def arm(self, number: int) -> None:
        """Make the call with this number fail, counted from 1 and from now."""
        self._remaining, self.failed = number, None

    def disarm(self) -> None:
        """Let all calls pass."""
        self._remaining = 0

    def _watched(self, owner: Any, name: str) -> Any:
        function = getattr(owner, name)
        label = f"{getattr(owner, '__name__', owner)}.{name}"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_due = self._is_due(label)
            if is_due and self._when == "before":
                raise self._error(label)
            result = function(*args, **kwargs)
            if is_due:
                raise self._error(label)
            return result

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            is_due = self._is_due(label)
            if is_due and self._when == "before":
                raise self._error(label)
            result = await function(*args, **kwargs)
            if is_due:
                raise self._error(label)
            return result

        return call_async if inspect.iscoroutinefunction(function) else call

    def _is_due(self, label: str) -> bool:
        self._remaining -= 1
        if self._remaining == 0:
            self.failed = label
        return self._remaining == 0
