"""Records in Redis: bounded, per tenant, shared by processes; and what is said when it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import redis

from benchmarks.private_ray import free_port
from deployments.api.base.errors import ApiError
from deployments.api.responses.kept import KeptResponses
from deployments.api.responses.redis_store import RECORD_BYTES, SHARE, RedisStore
from deployments.config.settings import ResponseSettings
from tests.deployments.api.responses.support.redis_server import redis_server

SIZE = RECORD_BYTES + 100
RECORD = b"\x00\xff" * 50


def name(number: int) -> str:
    return f"resp_{number:032x}"


class Shared:
    """A Redis, and time."""

    def __init__(self, url: str) -> None:
        self.url, self.now = url, 1000.0

    @asynccontextmanager
    async def store(self, max_bytes: int = 100 * SIZE, ttl_s: float = 100.0) -> AsyncIterator[RedisStore]:
        store = RedisStore(self.url, max_bytes, ttl_s, lambda: self.now)
        yield store
        await store.aclose()

    def names(self) -> set[str]:
        with redis.Redis.from_url(self.url, decode_responses=True) as client:
            return {str(key) for key in client.keys("*")}


@pytest.fixture
def shared() -> Iterator[Shared]:
    with redis_server() as url:
        yield Shared(url)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene()

    asyncio.run(run())


async def held(store: RedisStore, tenant: str, *numbers: int) -> list[bool]:
    return [record is not None for record in await store.get(tenant, [name(number) for number in numbers])]


def test_a_process_reads_replaces_and_deletes_records_that_another_keeps(shared: Shared) -> None:
    async def scene() -> None:
        async with shared.store() as one, shared.store() as other:
            assert await one.get("t", [name(1)]) == [None] and not await one.delete("t", name(1))
            await one.put("t", name(1), RECORD)
            assert await other.get("t", [name(1), name(2)]) == [RECORD, None]
            await other.put("t", name(1), b"")
            assert await one.get("t", [name(1)]) == [b""]
            assert await other.get("T", [name(1)]) == [None] and not await other.delete("T", name(1))
            assert await one.delete("t", name(1)) and not await other.delete("t", name(1))

    play(scene)
    assert shared.names() == set()


def test_a_full_store_forgets_unused_records_of_the_tenant_with_most(shared: Shared) -> None:
    async def scene() -> None:
        async with shared.store(max_bytes=SHARE * SIZE) as store:
            for number in range(3):
                await store.put("quiet", name(number), RECORD)
            for number in range(50):
                shared.now += 1
                await store.put("loud", name(number), RECORD)
            assert await held(store, "quiet", 0, 1, 2) == [True] * 3
            assert await held(store, "loud", 49, 48, 10, 0) == [True, True, False, False]
            assert len([key for key in shared.names() if "resp_" in key]) <= SHARE
            with pytest.raises(ApiError, match="can be stored"):
                await store.put("loud", name(49), b"x" * SHARE * SIZE)
            assert await held(store, "loud", 49) == [True]

    play(scene)


def test_unused_records_are_forgotten(shared: Shared) -> None:
    """Redis forgets records by its own clock, and the store their names by its."""

    async def scene() -> None:
        async with shared.store(ttl_s=0.001) as store:
            await store.put("t", name(1), RECORD)
            async with asyncio.timeout(60):
                while await held(store, "t", 1) == [True]:
                    await asyncio.sleep(0.01)
            shared.now += 1000
            await store.put("t", name(2), RECORD)
        async with shared.store() as store:
            await store.put("t", name(3), RECORD)
            assert await held(store, "t", 1, 3) == [False, True]
        with redis.Redis.from_url(shared.url) as client:
            assert client.hget("raydix:sizes", f"raydix:t:{name(1)}") is None

    play(scene)


def test_concurrent_changes_are_all_made(shared: Shared) -> None:
    async def scene() -> None:
        async with shared.store() as one, shared.store() as other:
            await one.put("t", name(1), b"")
            adds = [(one, other)[at % 2].update("t", name(1), lambda record: record + b"x") for at in range(20)]
            assert await asyncio.gather(*adds) == [True] * 20
            assert await one.get("t", [name(1)]) == [b"x" * 20]
            assert not await one.update("t", name(2), bytes)

    play(scene)


def test_a_redis_that_does_not_answer_is_a_503() -> None:
    async def scene() -> None:
        kept = KeptResponses(ResponseSettings(store=f"redis://:secret@127.0.0.1:{free_port()}/0"))
        for ask in (
            kept.store.get("t", [name(1)]),
            kept.store.put("t", name(1), b""),
            kept.store.delete("t", "x"),
        ):
            with pytest.raises(ApiError) as refused:
                await ask
            assert refused.value.status == 503 and refused.value.code == "store_unavailable"
            assert "responses.store" in refused.value.message and "secret" not in refused.value.message
        await kept.aclose()

    play(scene)
