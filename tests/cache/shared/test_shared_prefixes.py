"""Shared prefixes: held once, found under every salt, and what follows them is as separate as ever."""

from __future__ import annotations

import pytest

from cache import KVCacheManager, Namespace, SharedPrefixes
from cache.prefix_hash import block_hashes, prefix_root
from tests.cache.support.checked_cache import NAMESPACES, CheckedCache

OPEN, SALTED = NAMESPACES[0], NAMESPACES[2]
OTHER = Namespace("m", salt="other")
SYSTEM = list(range(100, 112))


def cache(num_pages: int = 40, page_size: int = 4, block_tokens: int | None = None) -> CheckedCache:
    return CheckedCache(KVCacheManager(num_pages, page_size, block_tokens=block_tokens))


def test_a_shared_prefix_is_found_under_every_salt_and_held_once() -> None:
    checked = cache()
    checked.share(SYSTEM)
    assert checked.cache.num_shared_pages == 3
    for namespace in (SALTED, OTHER, OPEN):
        assert checked.serve([*SYSTEM, 1, 2, 3], namespace) == len(SYSTEM)
        assert checked.serve([*SYSTEM, 1, 2, 3], namespace) == len(SYSTEM) + 2
    account = checked.cache.account()
    assert (account.locked, account.evictable) == (3, 3)  # one page after it for each namespace


def test_a_shared_prefix_survives_pressure_and_resets_and_empty_gates_are_removed() -> None:
    checked = cache(num_pages=8)
    checked.share(SYSTEM)
    for first in range(20):
        assert checked.serve([*SYSTEM, *range(first, first + 10)], SALTED) >= len(SYSTEM)
    checked.cache.reset()
    checked.forget_evicted()
    assert checked.cache.account() == (5, 0, 3, 0, 0)
    assert not any(node.gates for node, _ in checked.paths())
    assert checked.serve([*SYSTEM, 7], OTHER) == len(SYSTEM)


def test_only_prompts_that_continue_after_a_shared_prefix_use_it() -> None:
    checked = cache()
    checked.share(SYSTEM)
    assert checked.serve(SYSTEM, SALTED) == 0
    assert checked.serve([*SYSTEM[:8], 1, 2], SALTED) == 8  # of the salt's own
    assert checked.serve([*SYSTEM[:8], 1, 2], OTHER) == 0


def test_the_longest_of_several_is_used_and_each_keeps_whole_pages_and_blocks() -> None:
    checked = cache(page_size=4, block_tokens=6)
    long = [*SYSTEM, *range(200, 216)]
    checked.share(SYSTEM)
    checked.share(long)
    assert [len(prefix) for prefix in checked.shared] == [12, 24]
    assert checked.serve([*long, 1], SALTED) == 24
    assert checked.serve([*long[:-5], 1], OTHER) == 12
    assert checked.cache.num_shared_pages == 6


def test_a_fork_continues_next_to_its_first_lease() -> None:
    checked = cache()
    checked.share(SYSTEM)
    client = checked.start([*SYSTEM, 1], SALTED)
    checked.continue_with(client, [2, 3, 4, 5])
    fork = checked.fork(client, len(SYSTEM) + 2)
    checked.continue_with(fork, [9, 9])  # a fork gets its copy first
    checked.compute(fork, 4)
    checked.end(client)
    checked.end(fork)
    assert checked.serve([*SYSTEM, 1, 2, 9, 9, 9], SALTED) == len(SYSTEM) + 4


def test_tokens_that_are_not_held_cannot_be_shared() -> None:
    checked = cache()
    with pytest.raises(ValueError, match="only 0 of them are held"):
        checked.cache.share(OPEN, SYSTEM)
    checked.serve(SYSTEM, SALTED)
    with pytest.raises(ValueError, match="without a salt"):
        checked.cache.share(SALTED, SYSTEM)
    with pytest.raises(ValueError, match="prefix cache"):
        KVCacheManager(8, 4, prefix_cache=False).share(OPEN, SYSTEM)
    assert checked.cache.share(OPEN, SYSTEM[:3]) == 0


@pytest.mark.parametrize("namespace", [OPEN, SALTED, OTHER])
def test_routers_know_the_blocks_by_the_hashes_that_engines_report(namespace: Namespace) -> None:
    checked = cache(num_pages=60, page_size=4, block_tokens=4)
    checked.share(SYSTEM)
    prompt = [*SYSTEM, *range(300, 320)]
    checked.serve(prompt, namespace)
    log = checked.cache.prefix_log
    assert log is not None
    stored, _ = log.drain()
    shared = SharedPrefixes(4, 4, [SYSTEM])
    chain = shared.chain(namespace, prompt, 4)
    assert set(stored) == set(chain) and len(chain) == 8
    # The chain of a prompt goes on from its seed, wherever it ends.
    for length in range(len(prompt)):
        part = shared.chain(namespace, prompt[: length + 1], 4)[: length // 4]
        seed = shared.seed(namespace, prompt, part, 4)
        assert part + block_hashes(prompt[len(part) * 4 :], seed, 4) == chain or length <= len(SYSTEM) - 1


def test_without_shared_prefixes_hashes_are_as_ever() -> None:
    shared = SharedPrefixes(4, 4)
    assert shared.chain(SALTED, SYSTEM, 4) == block_hashes(SYSTEM, prefix_root(SALTED), 4)
