"""The native attention kernels compared with attention in float64, for each instruction set of this processor.

Rows with at most 16 queries per KV head are computed as decodes, others as extends. Both are generated, with
pieces (512 positions) and chunks (256) that are full, partial, and skipped by a window, and with latent KV, whose
values are the first numbers of its keys.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.kernels import native
from tests.engine.support.paged_kv import Heads, Paged

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest error of outputs of size about 1, from rounding sums, and weights and results to the type."""


def attend(case: Paged, kernels: native.Kernels) -> torch.Tensor:
    return case.attend(NativeAttention(case.shape, kernels.isa))


def assert_right(case: Paged, kernels: native.Kernels) -> None:
    error = (attend(case, kernels).double() - case.expected()).abs().max().item()
    assert error < _TOLERANCE[kernels.dtype]
    assert not case.pages.layer(0)[:, case.pages.null_page].any()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 0, 5, 31, 100, 255, 512, 700]), st.sampled_from([1, 1, 2, 3, 9, 33, 70])),
        min_size=1,
        max_size=4,
    ),
    heads=st.builds(Heads, st.integers(1, 8), st.integers(1, 3), st.sampled_from([32, 64, 96, 128, 256]))
    | st.builds(
        Heads, st.sampled_from([3, 16, 40]), st.just(1), st.sampled_from([96, 160]), st.sampled_from([32, 96])
    ),
    page_size=st.sampled_from([1, 3, 16, 64, 256]),
    window=st.sampled_from([None, None, 1, 7, 40, 300]),
    seed=st.integers(0, 1000),
    soft_cap=st.sampled_from([None, None, 0.5, 50.0]),
    has_sinks=st.booleans(),
)
def test_any_batch(
    kernels: native.Kernels,
    rows: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    window: int | None,
    seed: int,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    assert_right(Paged(rows, heads, page_size, window, kernels.dtype, seed, soft_cap, has_sinks), kernels)


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_long_rows_get_the_right_attention(kernels: native.Kernels, window: int | None, has_sinks: bool) -> None:
    """Rows have several blocks of queries and many chunks and pieces."""
    rows = [(1700, 1), (0, 600), (1100, 300)]
    assert_right(Paged(rows, Heads(2, 1, 64), 16, window, kernels.dtype, has_sinks=has_sinks), kernels)


def test_more_queries_a_head_than_a_decode_takes(kernels: native.Kernels) -> None:
    assert_right(Paged([(300, 1), (40, 2), (0, 20)], Heads(24, 1, 32), 16, None, kernels.dtype), kernels)


@pytest.mark.parametrize(("num_heads", "page_size"), [(16, 1), (128, 16), (16, 64)])
def test_latent_attention_of_published_sizes(kernels: native.Kernels, num_heads: int, page_size: int) -> None:
    """Of DeepSeek-V3's 128 heads, or a rank's 16; also beside `reference`, which computes in the same type."""
    case = Paged([(600, 1), (9, 3), (0, 70)], Heads(num_heads, 1, 576, 512), page_size, None, kernels.dtype)
    assert_right(case, kernels)
    error = (attend(case, kernels) - case.attend(ReferenceAttention(case.shape))).abs().max()
    assert error < _TOLERANCE[kernels.dtype]


@pytest.mark.parametrize("heads", [Heads(2, 3, 64), Heads(24, 1, 96, 64), Heads(8, 1, 96, 64)])
def test_a_row_gets_the_same_by_itself_and_on_any_threads(kernels: native.Kernels, heads: Heads) -> None:
    """Results are equal bit by bit with one or all KV heads per item, with and without pieces as items, and with
    any number of threads.
    """
    rows = [(1300, 1), (90, 4), (700, 80), (0, 300), (20, 1)]
    together = Paged(rows, heads, 16, None, kernels.dtype)
    threads = torch.get_num_threads()
    try:
        outputs = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            outputs.append(attend(together, kernels))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    for index, own in enumerate(outputs[0].split([n for _, n in rows])):
        assert torch.equal(attend(together.alone(index), kernels), own), rows[index]


@pytest.mark.parametrize("heads", [Heads(2, 2, 64), Heads(24, 1, 96, 64)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_prompt_gets_the_same_in_one_piece_and_in_several(
    kernels: native.Kernels, heads: Heads, has_sinks: bool
) -> None:
    """Results are equal bit by bit, so a cached prefix of a prompt changes nothing."""
    whole = Paged([(0, 600)], heads, 16, None, kernels.dtype, has_sinks=has_sinks)
    expected = attend(whole, kernels)
    for start in (100, 256, 499, 580):
        assert torch.equal(attend(whole.after(start), kernels), expected[start:]), start


def test_a_models_memory_is_that_of_the_layer_that_needs_most(kernels: native.Kernels) -> None:
    """Partial results are kept of all of a row's pieces, of which a window hides the first."""
    case = Paged([(3000, 1), (2000, 20)], Heads(2, 1, 32), 16, None, kernels.dtype)
    batch = native.batch_struct(case.batch)

    def size(*windows: int) -> int:
        layers = (native.NativeLayer * len(windows))(*(native.NativeLayer(window=window) for window in windows))
        heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "num_ropes": 1}
        model = native.NativeModel(num_layers=len(windows), hidden=64, intermediate=64, layers=layers, **heads)
        return kernels.forward_bytes(ctypes.byref(model), ctypes.byref(batch), 2)

    assert size(9, 0) == size(0, 9) == size(0, 0) > size(9, 9)
