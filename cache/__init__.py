"""Which request holds which KV page, what of it can be reused, and what goes first when memory is short.

Plain Python: pages are ints, tokens are int sequences, time is an argument. What lies in a page is the
runner's business; this package only says which page is whose.
"""

from cache.accounting import CacheStats, PageAccount
from cache.eviction import EvictionStrategy
from cache.kv_cache_manager import KVCacheManager
from cache.lease import Lease, Match, PageCopy
from cache.node import Namespace
from cache.page_pool import OutOfPages, PagePool
from cache.prefix_log import PrefixLog
from cache.radix_tree import RadixTree

__all__ = [
    "CacheStats",
    "EvictionStrategy",
    "KVCacheManager",
    "Lease",
    "Match",
    "Namespace",
    "OutOfPages",
    "PageAccount",
    "PageCopy",
    "PagePool",
    "PrefixLog",
    "RadixTree",
]
