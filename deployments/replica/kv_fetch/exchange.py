"""A replica's exchange of KV with others: it lends its engine's pages, and fetches those its requests lack."""

from __future__ import annotations

import logging

from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import WireSettings
from deployments.replica.kv_fetch.fetcher import KVFetcher
from deployments.replica.kv_fetch.nixl_agent import NixlAgent, check_nixl
from deployments.replica.kv_fetch.sender import KVSender
from engine.host_tier.peers import PageMemory
from engine.program.engine import Engine

logger = logging.getLogger("ray.serve")


def check_transport(settings: KvFetchSettings | None) -> None:
    """Raise RuntimeError, with what to do, if pages cannot be transferred here as `settings` say."""
    if settings is not None and settings.transport == "nixl":
        check_nixl()


def _agent_for(memory: PageMemory, settings: KvFetchSettings) -> NixlAgent | None:
    if settings.transport != "nixl":
        return None
    if (regions := memory.regions()) is None:
        logger.warning(
            "engines.kv_fetch.transport is nixl, but NIXL reads the memory of one process, and each rank of this "
            "model is a process: its pages go over sockets"
        )
        return None
    return NixlAgent(regions)


class KVExchange:
    """Both ends of one engine, whose loop must not have begun when this is made."""

    def __init__(
        self, engine: Engine, memory: PageMemory, host: str, settings: KvFetchSettings, wire: WireSettings
    ) -> None:
        """Raises OSError when no port of `wire.ports` is free, and RuntimeError when NIXL does not work."""
        self.page_bytes = memory.page_bytes
        self._settings = settings
        self._stopping_since: float | None = None
        self._agent = _agent_for(memory, settings)
        self.sender = KVSender(host, engine.loop, memory, settings, wire, self._agent)
        self.fetcher = KVFetcher(memory, engine.config.page_size, settings, self._agent)
        engine.connect_peers(self.fetcher)
        self.sender.start()

    @classmethod
    def of(
        cls, engine: Engine, host: str, settings: KvFetchSettings | None, wire: WireSettings
    ) -> KVExchange | None:
        """Return the exchange of an engine; None if it is disabled, or the engine lacks the memory for it: it
        needs host pages and a prefix cache.
        """
        memory = engine.runner.page_memory
        if settings is None or memory is None or not engine.config.prefix_cache:
            return None
        return cls(engine, memory, host, settings, wire)

    def may_end(self) -> bool:
        """Whether a stopping replica, since the first call, has waited without a transfer for as long as others
        may take to ask for what only it holds.
        """
        linger_s = self._settings.linger_s if self._settings.keep_tokens else 0.0
        awake_s = self.sender.awake_s
        if self._stopping_since is None:
            self._stopping_since = awake_s
        idle_since = max(self._stopping_since, self.sender.used_at)
        return not linger_s or (not self.sender.num_transfers and awake_s - idle_since >= linger_s)

    def close(self) -> None:
        """Abandon all transfers. Idempotent; the engine closes the fetcher too."""
        self.sender.close()
        self.fetcher.close()
        self._agent = None
