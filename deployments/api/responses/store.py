"""Stores responses by tenant: one tenant's responses do not exist for another."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from deployments.api.base.errors import ApiError

RECORD_BYTES = 512
"""Overhead of a record."""


def too_large(num_bytes: int, max_bytes: int) -> ApiError:
    """Create a 507 for a record that is larger than all that a store keeps."""
    message = f"The record has {num_bytes} bytes, but at most {max_bytes} can be stored (responses.max_bytes)."
    return ApiError(507, message, code="storage_full")


class ResponseStore(Protocol):
    """Keeps records for a time, by tenant and name."""

    is_shared: bool
    """Whether other processes have the same records."""

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        """Store a record, replacing the one with its name. Failures are raised, and leave that one unchanged."""

    async def get(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """Return the records with these names, which count as used; None for those that are not here."""

    async def delete(self, tenant: str, name: str) -> bool:
        """Forget a record; return whether there was one."""

    async def update(self, tenant: str, name: str, change: Callable[[bytes], bytes]) -> bool:
        """Replace a record by `change`'s result, excluding other writers; return whether there was one. Exceptions
        of `change` are raised, and leave the record unchanged.
        """

    async def aclose(self) -> None:
        """Close connections, if there are any."""


class MemoryStore:
    """Keeps records in this process. When full, it deletes the least recently used record of the tenant with the
    most. So no tenant evicts records of a tenant with less than its equal share.
    """

    is_shared = False

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep at most `max_bytes`, and nothing that was not used for `ttl_s` seconds."""
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._kept: dict[str, OrderedDict[str, tuple[float, bytes]]] = {}  # by tenant, the longest unused first
        self._sizes: dict[str, int] = {}
        self.num_bytes = 0
        """Number of bytes that are taken."""

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        """Keep a record. Raises `ApiError` 507 where it can never fit."""
        size = len(record) + RECORD_BYTES
        if size > self._max_bytes:
            raise too_large(size, self._max_bytes)
        self._forget(tenant, name)
        self._forget_old()
        while self.num_bytes + size > self._max_bytes:
            richest = max(self._sizes, key=lambda owner: self._sizes[owner] + (size if owner == tenant else 0))
            self._forget(richest, next(iter(self._kept[richest])))
        self._kept.setdefault(tenant, OrderedDict())[name] = (self._clock(), record)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        self.num_bytes += size

    async def get(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """Return the records with these names."""
        self._forget_old()
        kept, now = self._kept.get(tenant, OrderedDict()), self._clock()
        found: list[bytes | None] = []
        for name in names:
            record = kept[name][1] if name in kept else None
            if record is not None:
                kept[name] = (now, record)
                kept.move_to_end(name)
            found.append(record)
        return found

    async def update(self, tenant: str, name: str, change: Callable[[bytes], bytes]) -> bool:
        """Replace a record by `change`'s result."""
        (record,) = await self.get(tenant, [name])  # no other task runs meanwhile, because neither call waits
        if record is not None:
            await self.put(tenant, name, change(record))
        return record is not None

    async def delete(self, tenant: str, name: str) -> bool:
        """Forget a record."""
        self._forget_old()
        return self._forget(tenant, name)

    async def aclose(self) -> None:
        """Close nothing."""

    def _forget_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        for tenant in list(self._kept):
            while (kept := self._kept.get(tenant)) and next(iter(kept.values()))[0] < oldest:
                self._forget(tenant, next(iter(kept)))

    def _forget(self, tenant: str, name: str) -> bool:
        kept = self._kept.get(tenant)
        if kept is None or name not in kept:
            return False
        size = len(kept.pop(name)[1]) + RECORD_BYTES
        self.num_bytes -= size
        self._sizes[tenant] -= size
        if not kept:
            del self._kept[tenant], self._sizes[tenant]
        return True
