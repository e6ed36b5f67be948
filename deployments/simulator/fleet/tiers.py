"""Memory below a simulated replica's device: its settings, and the engine's own host tier on simulated pages.

    the device evicts a prefix ──▶ engine.host_tier.host_prefixes decides ──▶ host pages ──▶ back before a prefill

A page is a block of the trace, and copies take the time that the link to the host needs for its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache import CachedPrefix, KVCacheManager, Lease, Namespace
from cache.news.prefix_log import PrefixLog
from cache.news.tier import Tier
from engine.host_tier.host_pool import HostMemory, HostPool
from engine.host_tier.host_prefixes import HostPrefixes
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

_ANY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Tiers:
    """The size of KV, where else than on the device it can be, and how fast it moves. Sizes are in tokens."""

    host_tokens: int = 0
    """Tokens that fit into each replica's host memory; 0: no host tier."""
    host_min_uses: int = 2
    """Requests that must have used an evicted prefix for it to be kept: `engine.host_kv_min_uses`."""
    host_bandwidth: float = 25e9
    """Bytes/s between a device and its host, in each direction."""
    kv_bytes_per_token: float = 131_072.0
    """Bytes of KV of a token in all layers; the default is that of an 8B model in bfloat16."""

    file_tokens: int = 0
    """Tokens that fit into each replica's files, or into the store that all share; 0: none. They store what the
    host stores."""
    is_file_store_shared: bool = False
    """Whether all replicas read the same files."""
    file_bandwidth: float = 3e9
    """Bytes/s at which a replica reads and writes files, together."""
    file_latency_s: float = 0.001
    """Seconds until the first byte of a file."""
    peer_bandwidth: float | None = None
    """Bytes/s of a replica to its peers, in each direction; None: replicas fetch no KV from each other."""
    peer_latency_s: float = 0.002
    """Seconds until the first byte of a peer."""

    def __post_init__(self) -> None:
        if self.host_tokens < 0:
            raise ValueError(f"host_tokens must be at least 0, which means no host tier, got {self.host_tokens}")
        if self.file_tokens < 0:
            raise ValueError(f"file_tokens must be at least 0, which means no files, got {self.file_tokens}")
        if self.file_tokens and not self.host_tokens:
            raise ValueError(
                "file_tokens without host_tokens: evicted KV reaches files through host memory, so give that "
                "a size too"
            )
        if self.is_file_store_shared and not self.file_tokens:
            raise ValueError("a shared file store needs its size: set file_tokens to more than 0")
        if self.host_min_uses < 1:
            raise ValueError(f"host_min_uses must be at least 1: every prefix has one, got {self.host_min_uses}")
        for name in ("host_bandwidth", "file_bandwidth", "peer_bandwidth", "kv_bytes_per_token"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                unit = "bytes" if name == "kv_bytes_per_token" else "bytes/s"
                raise ValueError(f"{name} must be above 0 {unit}, got {value}")
        for name in ("file_latency_s", "peer_latency_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0 s, got {getattr(self, name)}")

    @property
    def title(self) -> str:
        """The tiers below the device, for the title of a table; empty for none."""
        host = f" + {self.host_tokens / 1e6:.1f}M on the host" if self.host_tokens else ""
        whose = "files that all share" if self.is_file_store_shared else "files"
        files = f" + {self.file_tokens / 1e6:.1f}M in {whose}" if self.file_tokens else ""
        peers = f", peers at {self.peer_bandwidth / 1e9:g} GB/s" if self.peer_bandwidth else ""
        return host + files + peers

    @property
    def has_fetches(self) -> bool:
        """Whether replicas take KV from anywhere except their own memory."""
        return bool(self.file_tokens) or self.peer_bandwidth is not None

    def check(self, block_tokens: int) -> None:
        """Raise ValueError for a tier that is smaller than a block."""
        for name, what in (("host_tokens", "host tier"), ("file_tokens", "files")):
            if 0 < getattr(self, name) < block_tokens:
                raise ValueError(
                    f"{name} must be at least {block_tokens}, a block of the trace, or 0 for no {what}; "
                    f"got {getattr(self, name)}"
                )


class HostTier:
    """One replica's host memory, to which `cache` evicts. Blocks are pages here; a prompt is its blocks."""

    def __init__(
        self, cache: KVCacheManager, namespace: Namespace, tiers: Tiers, block_tokens: int, prefill_rate: float
    ) -> None:
        """`prefill_rate` is in tokens/s."""
        self.page_seconds = block_tokens * tiers.kv_bytes_per_token / tiers.host_bandwidth
        """Seconds to copy a block in one direction."""
        self.num_pages = tiers.host_tokens // block_tokens
        self.blocks_out = self.blocks_in = 0
        """Blocks copied to the host, and back."""
        self._namespace = namespace
        self._blocks_per_second = prefill_rate / block_tokens
        self._log = _Kept(cache.prefix_log or PrefixLog())
        pool = HostPool(HostMemory(self.num_pages, self.page_seconds), self._log)
        self._prefixes = HostPrefixes(pool, 1, tiers.host_min_uses, 1)
        cache.on_evict = self._prefixes.on_evict

    def reader(self, request_id: str, tokens: Sequence[int]) -> Request:
        """Return a prompt as the engine's classes expect it; the last of its tokens is always computed."""
        return Request.make(request_id, tokens, _ANY, arrival=0.0, seed=0, namespace=self._namespace)

    def reach(self, reader: Request, num_found: int) -> int:
        """Count the leading blocks held by the device, which has `num_found`, and by the host, if copying is
        faster than computing.
        """
        reached = self._prefixes.reach(reader, CachedPrefix(num_found, num_found), self._blocks_per_second)
        self._prefixes.forget(reader.request_id)
        return reached

    def begin(self, reader: Request, num_found: int) -> int:
        """Return the same as `reach`, and keep these blocks until `load` or `forget`."""
        self._prefixes.begin_step()
        found = CachedPrefix(num_found, num_found)
        reached = self._prefixes.reach(reader, found, self._blocks_per_second)
        if reached > num_found:
            self._prefixes.hold(reader, found, reached)
        return reached

    def forget(self, reader: Request) -> None:
        """Release the blocks kept for a prompt that is not begun after all."""
        self._prefixes.forget(reader.request_id)

    def load(self, reader: Request, lease: Lease) -> float:
        """Copy the kept blocks to the pages of a lease, and the pages' previous content to the host; return the
        seconds that both take.
        """
        loads = self._prefixes.load(reader.request_id, lease).pages
        copies = self._prefixes.take_copies().pages
        self._prefixes.settle(host for _, host in copies)
        self.blocks_in += len(loads)
        self.blocks_out += len(copies)
        return (len(loads) + len(copies)) * self.page_seconds

    def drain_kept(self) -> list[int]:
        """Return the hashes of the blocks stored since the last call."""
        kept, self._log.kept = self._log.kept, []
        return kept


class _Kept(PrefixLog):
    """Reports what the host holds to a cache's log, and remembers what the host has stored."""

    def __init__(self, log: PrefixLog) -> None:
        super().__init__()
        self.kept: list[int] = []
        self._told = log

    def keep(self, hashes: Sequence[int], tier: Tier = Tier.HOST) -> None:
        """Record blocks that are kept from now on."""
        self._told.keep(hashes, tier)
        self.kept += hashes

    def drop(self, hashes: Sequence[int], tier: Tier = Tier.HOST) -> None:
        """Record blocks that are no longer kept."""
        self._told.drop(hashes, tier)
