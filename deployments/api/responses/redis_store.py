"""Keeps records in Redis, which several ingresses share.

raydix:T:resp_…     the record of a tenant, which expires in Redis if it is not used for long
raydix:used         names by the time of their last use
raydix:sizes        names and their sizes, by which one process at a time deletes excess records
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

from redis.asyncio import Redis, from_url
from redis.exceptions import RedisError, WatchError

from deployments.api.base.errors import RETRY_AFTER_S, ApiError
from deployments.api.responses.store import too_large

RECORD_BYTES = 1024
"""Overhead of a record, in Redis and in the two lists."""
SHARE = 16
"""The bound may be exceeded by this part of it, by each process."""
SWEEP_S = 60.0
PAGE = 2048
"""Names that are read or deleted per step, so that the event loop can run between steps."""
_TIMEOUT_S = 5.0
_USED, _SIZES, _LOCK = "raydix:used", "raydix:sizes", "raydix:sweep"


class RedisStore:
    """A `ResponseStore` that all ingresses with the same Redis share."""

    is_shared = True

    def __init__(self, url: str, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        """All processes together keep about `max_bytes`, and nothing that was not used for `ttl_s` seconds."""
        self._redis: Redis = from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._num_written = 0
        self._swept_at = float("-inf")

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        """Keep a record. Raises `ApiError` 503; 507 where it can never fit."""
        self._check_size(record)
        async with self._pipeline() as pipe:
            self._write(pipe, _key(tenant, name), record)
            await pipe.execute()
        await self._sweep_if_due(len(record))

    async def get(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """Return the records with these names. Raises `ApiError` 503."""
        if not names:
            return []
        keys = [_key(tenant, name) for name in names]
        async with self._pipeline() as pipe:
            for key in keys:
                pipe.getex(key, px=self._ttl_ms)
                pipe.zadd(_USED, {key: self._clock()}, xx=True)
            found = await pipe.execute()
        return list(found[::2])

    async def delete(self, tenant: str, name: str) -> bool:
        """Forget a record. Raises `ApiError` 503."""
        async with self._pipeline() as pipe:
            _forget(pipe, [_key(tenant, name)])
            num_gone, *_ = await pipe.execute()
        return bool(num_gone)

    async def update(self, tenant: str, name: str, change: Callable[[bytes], bytes]) -> bool:
        """Replace a record by the result of `change`, which is called again when another process was faster."""
        key = _key(tenant, name)
        while True:
            async with self._pipeline() as pipe:
                await pipe.watch(key)
                record = await pipe.get(key)
                if record is None:
                    return False
                fresh = change(record)
                self._check_size(fresh)
                pipe.multi()
                self._write(pipe, key, fresh)
                try:
                    await pipe.execute()
                except WatchError:
                    continue
            await self._sweep_if_due(len(fresh))
            return True

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    @property
    def _ttl_ms(self) -> int:
        return max(1, round(self._ttl_s * 1000))

    @asynccontextmanager
    async def _pipeline(self) -> AsyncIterator[Any]:
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                yield pipe
        except WatchError:
            raise
        except (RedisError, OSError) as error:
            raise ApiError(
                503,
                "Stored responses are unavailable now: Redis (responses.store) does not answer; retry later.",
                code="store_unavailable",
                headers={"retry-after": f"{RETRY_AFTER_S:.0f}"},
            ) from error

    def _check_size(self, record: bytes) -> None:
        if len(record) + RECORD_BYTES > self._max_bytes:
            raise too_large(len(record) + RECORD_BYTES, self._max_bytes)

    def _write(self, pipe: Any, key: str, record: bytes) -> None:
        pipe.set(key, record, px=self._ttl_ms)
        pipe.zadd(_USED, {key: self._clock()})
        pipe.hset(_SIZES, key, str(len(record) + RECORD_BYTES))

    async def _sweep_if_due(self, num_written: int) -> None:
        self._num_written += num_written + RECORD_BYTES
        now = self._clock()
        if self._num_written < self._max_bytes // SHARE and now - self._swept_at < SWEEP_S:
            return
        self._num_written, self._swept_at = 0, now
        async with self._pipeline() as pipe:
            pipe.set(_LOCK, b"", nx=True, px=round(_TIMEOUT_S * 1000))
            (is_ours,) = await pipe.execute()
        if is_ours:
            await self._sweep(now)

    async def _sweep(self, now: float) -> None:
        """Delete the names of records that are too old; then the least recently used ones of the tenant with the
        most."""
        most = self._max_bytes - self._max_bytes // SHARE
        gone = await asyncio.to_thread(_too_much, await self._kept(), now - self._ttl_s, most)
        for start in range(0, len(gone), PAGE):
            async with self._pipeline() as pipe:
                _forget(pipe, gone[start : start + PAGE])
                await pipe.execute()
        async with self._pipeline() as pipe:
            pipe.delete(_LOCK)
            await pipe.execute()

    async def _kept(self) -> dict[bytes, _Kept]:
        """Return the stored records by name, the least recently used first. They are read page by page, because
        there may be a hundred thousand names.
        """
        kept: dict[bytes, _Kept] = {}
        for start in count(0, PAGE):
            async with self._pipeline() as pipe:
                pipe.zrange(_USED, start, start + PAGE - 1, withscores=True)
                (used,) = await pipe.execute()
            if not used:
                return kept
            async with self._pipeline() as pipe:
                pipe.hmget(_SIZES, [name for name, _ in used])
                (sizes,) = await pipe.execute()
            for (name, used_at), size in zip(used, sizes, strict=True):
                kept.pop(name, None)  # It was used while earlier pages were read.
                kept[name] = _Kept(used_at, RECORD_BYTES if size is None else int(size))
        return kept


class _Kept(NamedTuple):
    """A record that is kept."""

    used_at: float
    size: int


def _too_much(kept: dict[bytes, _Kept], oldest: float, most: int) -> list[bytes]:
    """Return the names to delete, so that no record older than `oldest` and at most `most` bytes stay."""
    gone = [name for name, one in kept.items() if one.used_at < oldest]
    names: dict[bytes, list[bytes]] = defaultdict(list)  # by tenant, the least recently used last
    taken: dict[bytes, int] = defaultdict(int)
    for name, one in reversed(kept.items()):
        if one.used_at >= oldest:
            tenant = name.split(b":")[1]
            names[tenant].append(name)
            taken[tenant] += one.size
    total = sum(taken.values())
    while total > most:
        richest = max(taken, key=taken.__getitem__)
        gone.append(names[richest].pop())
        taken[richest] -= kept[gone[-1]].size
        total -= kept[gone[-1]].size
    return gone


def _key(tenant: str, name: str) -> str:
    return f"raydix:{tenant}:{name}"


def _forget(pipe: Any, keys: Sequence[str | bytes]) -> None:
    pipe.delete(*keys)
    pipe.zrem(_USED, *keys)
    pipe.hdel(_SIZES, *keys)
