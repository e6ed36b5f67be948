"""Memory below a simulated replica's device: its settings, and the engine's own host tier on simulated pages.

    the device evicts a prefix ──▶ engine.scheduling.host_prefixes decides ──▶ host pages ──▶ back before a prefill

A page is a block of the trace, and copies take the time that the link to the host needs for its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache import KVCacheManager, Namespace
from cache.prefix_log import PrefixLog
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.host_pool import HostMemory, HostPool
from engine.scheduling.host_prefixes import HostPrefixes

_ANY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Tiers:
    """What KV weighs, where it can lie beside the device, and how fast it moves. Sizes are in tokens."""

    host_tokens: int = 0
    """Room in each replica's host memory; 0: no host tier."""
    host_min_uses: int = 2
    """Requests that must have used an evicted prefix for it to be kept: `engine.host_kv_min_uses`."""
    host_bandwidth: float = 25e9
    """Bytes/s between a device and its host, in each direction."""
    kv_bytes_per_token: float = 131_072.0
    """Bytes of KV of a token in all layers; the default is that of an 8B model in bfloat16."""

    def __post_init__(self) -> None:
        if self.host_tokens < 0:
            raise ValueError(f"host_tokens must be at least 0, which means no host tier, got {self.host_tokens}")
        if self.host_min_uses < 1:
            raise ValueError(f"host_min_uses must be at least 1: every prefix has one, got {self.host_min_uses}")
        for name in ("host_bandwidth", "kv_bytes_per_token"):
            if not 0.0 < getattr(self, name) < float("inf"):
                unit = "bytes" if name == "kv_bytes_per_token" else "bytes/s"
                raise ValueError(f"{name} must be above 0 {unit}, got {getattr(self, name)}")

    @property
    def title(self) -> str:
        """What there is beside the device, for the title of a table; empty for nothing."""
        return f" + {self.host_tokens / 1e6:.1f}M on the host" if self.host_tokens else ""

    def check(self, block_tokens: int) -> None:
        """Raise ValueError for a tier without room for a block."""
        if 0 < self.host_tokens < block_tokens:
            raise ValueError(
                f"host_tokens must be at least {block_tokens}, a block of the trace, or 0 for no host tier; "
                f"got {self.host_tokens}"
            )


class HostTier:
    """One replica's host memory, which `cache` evicts to. Blocks are pages here; a prompt is its blocks."""

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
        pool = HostPool(HostMemory(self.num_pages, self.page_seconds), cache.prefix_log or PrefixLog())
        self._prefixes = HostPrefixes(pool, 1, tiers.host_min_uses, 1)
        cache.on_evict = self._prefixes.on_evict

    def reader(self, request_id: str, tokens: Sequence[int]) -> Request:
        """Return a prompt as the engine's classes want it; the last of its tokens is always computed."""
        return Request.make(request_id, tokens, _ANY, arrival=0.0, seed=0, namespace=self._namespace)

    def reach(self, reader: Request, num_found: int) -> int:
        """Count the leading blocks that the device, which has `num_found`, and the host hold, if a copy is
        sooner there than they are computed.
        """
        reached = self._prefixes.reach(reader, num_found, self._blocks_per_second)
        self._prefixes.forget(reader.request_id)
        return reached

    def begin(self, reader: Request, num_found: int) -> int:
        """Return what `reach` does, and keep it there until `load` or `forget`."""
        self._prefixes.begin_step()
        reached = self._prefixes.reach(reader, num_found, self._blocks_per_second)
        if reached > num_found:
            self._prefixes.hold(reader, num_found, reached)
        return reached

    def forget(self, reader: Request) -> None:
        """Let go of what was kept for a prompt that is not begun after all."""
        self._prefixes.forget(reader.request_id)

    def load(self, reader: Request, table: list[int]) -> float:
        """Copy what was kept to the pages of `table`, and what these pages have lost to the host; return the
        seconds that both take.
        """
        loads = self._prefixes.load(reader.request_id, table)
        copies = self._prefixes.take_copies()
        self._prefixes.settle(copies)
        self.blocks_in += len(loads)
        self.blocks_out += len(copies)
        return (len(loads) + len(copies)) * self.page_seconds
