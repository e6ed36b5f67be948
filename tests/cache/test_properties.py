"""Random histories of the cache against the brute-force model: 12,000 operations, all checked after each."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache import KVCacheManager
from tests.cache.support.checked_cache import CheckedCache
from tests.cache.support.random_operations import RandomOperations

OPERATIONS = 400
HISTORIES = 30


def run_history(
    seed: int, page_size: int, num_pages: int, eviction: str, num_operations: int, *, prefix_cache: bool = True
) -> CheckedCache:
    checked = CheckedCache(KVCacheManager(num_pages, page_size, eviction=eviction, prefix_cache=prefix_cache))
    driver = RandomOperations(checked, seed)
    for _ in range(num_operations):
        driver.step()
        checked.check()
        checked.check_locks()
    while checked.clients:
        driver.finish()
        checked.check()
    assert checked.cache.account() == (*checked.cache.account()[:2], 0, 0)
    checked.cache.reset()
    assert checked.cache.account() == (num_pages, 0, 0, 0)
    assert not checked.cache._tree._roots
    return checked


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from((1, 2, 3, 4, 4, 5, 8, 16, 256)),
    num_pages=st.integers(6, 60),
    eviction=st.sampled_from(("lru", "lfu", "priority")),
    prefix_cache=st.sampled_from((True, True, False)),
)
def test_any_history_reads_its_own_kv_and_loses_no_page(
    seed: int, page_size: int, num_pages: int, eviction: str, prefix_cache: bool
) -> None:
    run_history(seed, page_size, num_pages, eviction, OPERATIONS, prefix_cache=prefix_cache)
