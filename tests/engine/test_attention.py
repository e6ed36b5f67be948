"""The step's metadata and the reference backend, against attention written out one query at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Namespace
from engine.attention.base import AttentionShape, choose_backend
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import KVPages
from engine.attention.reference import ReferenceAttention
from engine.plan import Chunk
from engine.request import Request
from engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
DIM = 8


def chunk(start: int, num_tokens: int, pages: list[int]) -> Chunk:
    sampling = SamplingParams()
    request = Request.make("r", [0], sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
    return Chunk(request, start, num_tokens, [0] * num_tokens, pages, samples=True)


def test_the_batch_of_two_decodes_and_a_prefill() -> None:
    chunks = [chunk(5, 1, [3, 0, 9]), chunk(0, 1, [2]), chunk(2, 3, [7, 1])]
    batch = AttentionBatch.from_chunks(chunks, page_size=4, null_page=10, device=CPU)
    assert batch.num_decodes == 2
    assert batch.query_lens == [1, 1, 3]
    assert batch.kv_lens_host == batch.kv_lens.tolist() == [6, 1, 5]
    assert batch.qo_indptr.tolist() == [0, 1, 2, 5]
    assert batch.block_table.tolist() == [[3, 0], [2, 10], [7, 1]]  # page 9 holds nothing yet
    assert batch.positions.tolist() == [5, 0, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [0 * 4 + 1, 2 * 4, 7 * 4 + 2, 7 * 4 + 3, 1 * 4]


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """float64 [n, H, D] queries at positions start .. over [T, K, D] keys and values, query by query."""
    group = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for i in range(query.shape[0]):
        first = 0 if window is None else max(0, start + i - window + 1)
        for head in range(query.shape[1]):
            k = keys[first : start + i + 1, head // group]
            weights = (k @ query[i, head] * DIM**-0.5).softmax(0)
            out[i, head] = weights @ values[first : start + i + 1, head // group]
    return out


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 9, 33])), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    page_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([None, 1, 7, 40]),
    max_scores=st.sampled_from([1 << 22, 50]),
    free_padding=st.sampled_from([0, 512]),
    seed=st.integers(0, 1000),
)
def test_the_reference_backend(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    window: int | None,
    max_scores: int,
    free_padding: int,
    seed: int,
) -> None:
    """Any mix of rows, also decode-like rows behind prefill rows, over scattered pages full of NaN before."""
    generator = torch.Generator().manual_seed(seed)
    per_row = -(-103 // page_size)
    order = torch.randperm(per_row * len(rows), generator=generator).tolist()
    pages = KVPages(1, len(order), page_size, heads[1], DIM, torch.float64, CPU)
    pages.layer(0)[:, : pages.num_pages] = torch.nan
    chunks = [chunk(*row, order[i * per_row : (i + 1) * per_row]) for i, row in enumerate(rows)]
    history = [
        torch.randn(2, start + n, heads[1], DIM, generator=generator, dtype=torch.float64) for start, n in rows
    ]
    slots = pages.layer(0).flatten(1, 2)
    for (start, _), row, held in zip(rows, chunks, history, strict=True):
        where = [row.pages[p // page_size] * page_size + p % page_size for p in range(start)]
        slots[:, where] = held[:, :start]
    total = sum(n for _, n in rows)
    query = torch.randn(total, heads[0], DIM, generator=generator, dtype=torch.float64)
    new = torch.cat([held[:, start:] for (start, _), held in zip(rows, history, strict=True)], dim=1)

    batch = AttentionBatch.from_chunks(chunks, page_size, pages.null_page, CPU)
    backend = ReferenceAttention(AttentionShape(*heads, DIM, page_size, frozenset({window})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.attention.reference._MAX_SCORES", max_scores)
        patch.setattr("engine.attention.reference._FREE_PADDING", free_padding)
        step = backend.prepare(batch, pages.null_page)
    out = step.forward(pages.layer(0), query, new[0], new[1], window)

    expected = [
        plain_attention(q, held[0], held[1], start, window)
        for (start, _), held, q in zip(rows, history, query.split([n for _, n in rows]), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected).flatten(1))
    assert not pages.layer(0)[:, pages.null_page].any()


def test_auto_takes_a_backend_that_runs_here() -> None:
    shape = AttentionShape(4, 2, 64, 16, frozenset({None}))
    assert choose_backend("auto", shape, torch.float32, CPU).name
    assert isinstance(choose_backend("reference", shape, torch.float32, CPU), ReferenceAttention)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"'magic'.*auto, .*reference"):
        choose_backend("magic", AttentionShape(4, 2, 64, 16, frozenset({None})), torch.float32, CPU)
