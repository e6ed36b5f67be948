"""Random histories of the cache against the brute-force model: thousands of operations, all checked after each."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache import KVCacheManager
from tests.cache.support.checked_cache import NAMESPACES, CheckedCache
from tests.cache.support.random_operations import RandomOperations
from tests.support.examples import examples

OPERATIONS = 400
HISTORIES = examples(15)


def run_history(
    seed: int,
    page_size: int,
    num_pages: int,
    eviction: str,
    num_operations: int,
    *,
    prefix_cache: bool = True,
    shared: Sequence[Sequence[int]] = (),
) -> CheckedCache:
    checked = CheckedCache(KVCacheManager(num_pages, page_size, eviction=eviction, prefix_cache=prefix_cache))
    for prefix in shared:
        checked.share(prefix)
    driver = RandomOperations(checked, seed)
    for _ in range(num_operations):
        driver.step()
        checked.check()
        checked.check_locks()
    driver.end()
    checked.check()
    num_shared = len(checked.shared_pages())
    assert checked.cache.num_shared_pages == num_shared
    assert checked.cache.account() == (*checked.cache.account()[:2], num_shared, 0, 0)
    checked.cache.reset()
    assert checked.cache.account() == (num_pages - num_shared, 0, num_shared, 0, 0)
    assert set(checked.cache.tree.roots) == ({NAMESPACES[0]} if shared else set())
    assert not any(node.gates for node, _ in checked.paths())
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


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from((1, 2, 3, 4, 8)),
    num_pages=st.integers(12, 60),
    eviction=st.sampled_from(("lru", "lfu", "priority")),
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=2),
    lengths=st.lists(st.sampled_from((1, 1.5, 2)), min_size=1, max_size=2),
)
def test_any_history_with_shared_prefixes_reads_its_own_kv_and_loses_no_page(
    seed: int, page_size: int, num_pages: int, eviction: str, tokens: list[int], lengths: list[float]
) -> None:
    """Prefixes of one or two pages, of which one may begin the other; most requests have salts."""
    shared = [(tokens * 16)[: int(length * page_size) + 1] for length in lengths]
    run_history(
        seed, page_size, num_pages, eviction, OPERATIONS, shared=[p for p in shared if len(p) >= page_size]
    )
