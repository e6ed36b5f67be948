"""The KV cache: which request holds which page, what can be reused, and what is evicted first.

Plain Python: pages are ints, tokens are int sequences, time is an argument. The runner knows what a page contains;
this package only knows which page belongs to which request.
"""

from cache.accounting import CacheStats, PageAccount
from cache.eviction import EvictionStrategy
from cache.kv_cache_manager import KVCacheManager
from cache.lease import Found, Lease, Match, PageCopy
from cache.lease_state import LeaseState, StateStep
from cache.node import Namespace
from cache.page_pool import OutOfPages, PagePool
from cache.prefix_log import PrefixLog
from cache.radix_tree import RadixTree
from cache.scratch import Scratch, ScratchRows
from cache.shared_prefixes import SharedPrefixes
from cache.snapshots import StateAccount
from cache.windows import LeaseWindow, Window

__all__ = [
    "CacheStats",
    "EvictionStrategy",
    "Found",
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
