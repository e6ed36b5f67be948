"""The KV cache: which request holds which page, what can be reused, and what is evicted first.

Plain Python: pages are ints, tokens are int sequences, time is an argument. The runner knows what a page contains;
this package only knows which page belongs to which request.
"""

from cache.eviction import EvictionStrategy
from cache.figures.accounting import CacheStats, PageAccount
from cache.kv_cache_manager import KVCacheManager
from cache.lease import CachedPrefix, Lease, Match, PageCopy
from cache.news.prefix_log import PrefixLog
from cache.node import Namespace
from cache.page_pool import OutOfPages, PagePool
from cache.radix_tree import RadixTree
from cache.resume.lease_state import LeaseState, StateStep
from cache.resume.snapshots import StateAccount
from cache.resume.windows import LeaseWindow, Window
from cache.scratch import Scratch, ScratchRows
from cache.shared.shared_prefixes import SharedPrefixes

__all__ = [
    "CacheStats",
    "CachedPrefix",
    "EvictionStrategy",
    "KVCacheManager",
    "Lease",
    "LeaseState",
    "LeaseWindow",
    "Match",
    "Namespace",
    "OutOfPages",
    "PageAccount",
    "PageCopy",
    "PagePool",
    "PrefixLog",
    "RadixTree",
    "Scratch",
    "ScratchRows",
    "SharedPrefixes",
    "StateAccount",
    "StateStep",
    "Window",
]
