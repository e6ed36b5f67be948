from __future__ import annotations

import pytest

from cache import OutOfPages, PagePool


def test_every_page_goes_out_once_and_comes_back() -> None:
    pool = PagePool(5)
    pages = pool.allocate(3) + pool.allocate(2)
    assert sorted(pages) == [0, 1, 2, 3, 4] and pool.num_free == 0
    pool.free(pages[:2])
    assert sorted(pool.allocate(2)) == sorted(pages[:2])


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 of 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3 and pool.allocate(0) == []


def test_the_page_freed_last_goes_out_first() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.free([pages[1]])
    assert pool.allocate(1) == [pages[1]]


@pytest.mark.parametrize("page", [-1, 4, 2])
def test_a_page_that_is_not_taken_cannot_be_freed(page: int) -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match=r"does not belong to this pool|freed twice"):
        pool.free([page])
    assert pool.num_free == 2


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        PagePool(1).allocate(-1)
