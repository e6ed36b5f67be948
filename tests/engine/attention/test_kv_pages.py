"""Copies of pages, by the native library and by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import PageCopy
from engine.attention.kv_pages import FP8, KVPages
from engine.kernels import native

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE = 9, 4
MakePages = Callable[[torch.dtype, int], KVPages]


def make_pages(dtype: torch.dtype, parts: int) -> KVPages:
    pages = KVPages(3, NUM_PAGES, PAGE_SIZE, 2, 5, dtype, CPU, parts)
    pages.data[:] = torch.randn(pages.data.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return pages


@pytest.fixture(scope="module")
def pages_of_torch() -> Iterator[MakePages]:
    """Makes pages as where the library was not built."""

    def make(dtype: torch.dtype, parts: int) -> KVPages:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAYDIX_NATIVE_LIBRARY", "missing.so")
            native.forget()
            try:
                return make_pages(dtype, parts)
            finally:
                native.forget()

    yield make


@settings(max_examples=60, deadline=None)
@given(
    copies=st.lists(
        st.builds(
            PageCopy,
            st.integers(0, NUM_PAGES - 1),
            st.integers(0, NUM_PAGES - 1),
            st.integers(1, PAGE_SIZE),
        ),
        max_size=6,
        unique_by=lambda copy: copy.target,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, FP8]),
    parts=st.sampled_from([1, 2]),
)
def test_all_sources_are_read_before_any_target_is_written(
    copies: list[PageCopy], dtype: torch.dtype, parts: int, pages_of_torch: MakePages
) -> None:
    for pages in (make_pages(dtype, parts), pages_of_torch(dtype, parts)):
        before = pages.raw.clone()
        pages.copy(copies)
        for copy in copies:
            copied = pages.raw[:, :, copy.target, : copy.num_tokens]
            assert torch.equal(copied, before[:, :, copy.source, : copy.num_tokens])
        others = sorted(set(range(NUM_PAGES + 1)) - {copy.target for copy in copies})
        assert torch.equal(pages.raw[:, :, others], before[:, :, others])
