"""Bounds the bodies that an ingress reads and works on concurrently, and thereby their memory.

    arrives    1 byte a byte, as it arrives: an announced length takes no room
    parsed     and VALUE_BYTES for each value and name; what JSON becomes is counted before it is made
    planned    nothing: only token ids are left, which admission bounds (`admission.max_waiting_tokens`), and what
               an answer repeats of its request, where it is more than the prompt explains (`BodyRoom.another`)

Stored responses that a request reads count as if they were in the body.

A byte counted here is `MEMORY_FACTOR` bytes of memory at most, while texts are parsed, rendered and tokenized.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType

from deployments.api.base.errors import RETRY_AFTER_S, ApiError

VALUE_BYTES = 8
MEMORY_FACTOR = 32


class BodyMemory:
    """The room for bodies of one service. Thread-safe."""

    def __init__(self, max_bytes: int, *, has_tenants: bool) -> None:
        """`max_bytes` are for all bodies together. Each tenant may take half of them; where there are none, each
        address three quarters.
        """
        self.bound(max_bytes, has_tenants=has_tenants)
        self.lock = threading.RLock()
        """Held while the taken bytes change."""
        self._taken: Counter[str] = Counter()  # bytes by tenant or address
        self.num_bytes = 0
        """Number of bytes that are taken now."""

    def bound(self, max_bytes: int, *, has_tenants: bool) -> None:
        """Let bodies take this much from now on; room in use stays in use."""
        self._max_bytes, self._most_each = max_bytes, max_bytes // 2 if has_tenants else max_bytes - max_bytes // 4

    def open(self, tenant: str) -> BodyRoom:
        """Begin to read a body."""
        return BodyRoom(self, tenant)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Take room for a tenant, or where there are none for an address. Raises `ApiError` 429 when there is not
        enough.
        """
        with self.lock:
            is_too_much = self._taken[tenant] + num_bytes > self._most_each
            if is_too_much or self.num_bytes + num_bytes > self._max_bytes:
                raise self._refusal(num_bytes)
            self.num_bytes += num_bytes
            self._taken[tenant] += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Give room back that was taken."""
        with self.lock:
            self.num_bytes -= num_bytes
            self._taken[tenant] -= num_bytes
            if not self._taken[tenant]:
                del self._taken[tenant]

    def _refusal(self, num_bytes: int) -> ApiError:
        """Create the error for a body that has no room for so many bytes."""
        message = (
            f"The server is working on as many bytes of bodies as it accepts ({self._max_bytes}, "
            "limits.max_total_body_bytes); retry later."
        )
        return overloaded(message)


def overloaded(message: str) -> ApiError:
    """Create a 429 for bytes that find no room now."""
    return ApiError(429, message, code="overloaded", headers={"retry-after": f"{RETRY_AFTER_S:.0f}"})


class RoomClosed(Exception):
    """The request has ended while a thread still works on its body."""


class BodyRoom:
    """The room that one body takes. A context, which gives it back at its end. Thread-safe."""

    def __init__(self, memory: BodyMemory, tenant: str) -> None:
        self._memory, self._tenant = memory, tenant
        self._num_bytes = 0
        self._is_closed = False

    def take(self, num_bytes: int) -> None:
        """Take more room. Raises `ApiError` 429 when there is not enough, and `RoomClosed` after the end."""
        with self._memory.lock:
            if self._is_closed:
                raise RoomClosed
            self._memory.take(self._tenant, num_bytes)
            self._num_bytes += num_bytes

    def another(self) -> BodyRoom:
        """Return an empty room for the same tenant."""
        return BodyRoom(self._memory, self._tenant)

    def close(self) -> None:
        """Give all of it back. Idempotent."""
        with self._memory.lock:
            self._memory.give_back(self._tenant, self._num_bytes)
            self._num_bytes, self._is_closed = 0, True

    def give_back(self, num_bytes: int) -> None:
        """Give some of the room back before the end."""
        self._memory.give_back(self._tenant, num_bytes)
        self._num_bytes -= num_bytes

    def __enter__(self) -> BodyRoom:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
