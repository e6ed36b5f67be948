"""One process's access to responses: their store, and those that run in the background."""

from __future__ import annotations

import importlib.util

from deployments.api.base.errors import invalid
from deployments.api.responses.background import BackgroundResponses
from deployments.api.responses.directory_store import DirectoryStore
from deployments.api.responses.store import MemoryStore, ResponseStore
from deployments.config.settings import ResponseSettings


class KeptResponses:
    """The store and the background of one process."""

    def __init__(self, settings: ResponseSettings | None = None, store: ResponseStore | None = None) -> None:
        """Without a `store`, responses are kept where the settings say."""
        self.settings = settings or ResponseSettings()
        self.store: ResponseStore = store or _store_for(self.settings)
        self.background = BackgroundResponses(self.settings.max_background)

    async def aclose(self) -> None:
        """End responses in the background, and leave the store."""
        await self.background.aclose()
        await self.store.aclose()

    def check_background(self, tenant: str) -> None:
        """Raise `ApiError` when no response can be generated in the background, or not now."""
        if not self.settings.max_bytes:
            raise invalid("background needs responses to be stored, but responses.max_bytes is 0.", "background")
        self.background.check_room(tenant)


def check_store(settings: ResponseSettings) -> None:
    """Raise RuntimeError when responses are to be kept in Redis and its client is not installed."""
    if settings.is_redis and importlib.util.find_spec("redis") is None:
        raise RuntimeError(
            "responses.store names a Redis, whose client is not installed here: pip install 'raydix[redis]', "
            "or keep responses in a directory"
        )


def _store_for(settings: ResponseSettings) -> ResponseStore:
    if settings.is_redis:
        check_store(settings)
        from deployments.api.responses.redis_store import RedisStore  # imported here because it imports the client

        return RedisStore(settings.store, settings.max_bytes, settings.ttl_s)
    if settings.directory is not None:
        return DirectoryStore(settings.directory, settings.max_bytes, settings.ttl_s)
    return MemoryStore(settings.max_bytes, settings.ttl_s)
