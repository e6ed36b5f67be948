"""Loans: whole pages that stay as they are, which is no use of them and a state of its own."""

from __future__ import annotations

from cache import Namespace, PageAccount
from tests.cache.support.checked_cache import NAMESPACES, checked_cache

NS = NAMESPACES[0]


def test_only_whole_pages_are_lent_and_all_of_them() -> None:
    checked = checked_cache()
    checked.serve(range(15))
    for length, num_pages in ((16, 3), (12, 3), (11, 2), (4, 1)):
        loan = checked.cache.lend(NS, range(length))
        assert loan is not None and len(loan.pages) == num_pages
        checked.cache.take_back(loan)
    assert checked.cache.lend(NS, range(3)) is None
    assert checked.cache.lend(Namespace("m", salt="other"), range(15)) is None
    checked.check_locks()


def test_lent_pages_are_neither_evicted_nor_counted_as_used() -> None:
    checked = checked_cache(num_pages=8)
    checked.serve(range(16))
    checked.lend(NS, list(range(12)))
    assert checked.cache.account() == PageAccount(free=4, evictable=1, locked=0, private=0, lent=3)
    assert checked.cache.reset() == 1
    checked.forget_evicted()
    other = checked.start([50] * 20)
    assert checked.cache.account() == PageAccount(free=0, evictable=0, locked=0, private=5, lent=3)
    checked.end(other)
    checked.take_back(0)
    assert checked.cache.account().lent == 0 and checked.cache.stats.hit_tokens == 0


def test_pages_that_a_request_also_holds_are_locked_and_not_lent() -> None:
    checked = checked_cache()
    checked.serve(range(32))
    checked.lend(NS, list(range(32)))
    client = checked.start([*range(16), 99])
    assert checked.cache.account()[2:] == (4, 1, 4)
    checked.lend(NS, list(range(8)))
    assert checked.cache.account()[2:] == (4, 1, 4), "a page that is lent twice is counted once"
    checked.end(client)
    assert checked.cache.account()[2:] == (0, 0, 8)
    checked.take_back(0)
    checked.check_locks()
    assert checked.cache.account()[2:] == (0, 0, 2)


def test_a_shared_prefix_is_lent_to_salts_and_stays_locked() -> None:
    checked = checked_cache()
    checked.share(range(8))
    salt = NAMESPACES[2]
    for tokens in (list(range(8)), list(range(12))):
        checked.lend(salt, tokens)
        checked.check_locks()
        assert checked.cache.account()[2:] == (2, 0, 0)
    checked.serve(range(13), salt)
    checked.lend(salt, list(range(12)))
    checked.check_locks()
    assert checked.cache.account()[2:] == (2, 0, 1)
