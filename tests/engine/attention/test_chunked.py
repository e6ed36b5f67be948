"""Attention within chunks: what a query sees, by every way in which rows can be cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.chunked import ChunkedAttention, cut_batch
from engine.attention.reference import ReferenceAttention
from engine.loading.load_model import load_model
from engine.settings.config import EngineConfig
from tests.engine.support.oracle import save_tiny

CPU = torch.device("cpu")
CHUNK, PAGE, NULL = 8, 4, 99


def batch_of(rows: list[tuple[int, int]]) -> AttentionBatch:
    """Rows of (positions before the step, tokens of the step), each with pages of its own."""
    counts, ends = [count for _, count in rows], [start + count for start, count in rows]
    widths = [-(-end // PAGE) for end in ends]
    table = torch.full((len(rows), max(widths)), NULL, dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width] = torch.arange(width) + sum(widths[:row])
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    return AttentionBatch(
        num_decodes=next((row for row, count in enumerate(counts) if count > 1), len(rows)),
        query_lens=counts,
        kv_lens_host=ends,
        qo_indptr=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        kv_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=table,
        slot_mapping=positions,
        positions=positions,
    )


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=4))
def test_a_cut_row_has_the_pages_of_its_tokens_chunk(rows: list[tuple[int, int]]) -> None:
    """Each token's row holds the slots from its chunk's first position to the row's end, in order."""
    rows = sorted(rows, key=lambda row: row[1] > 1)
    batch = batch_of(rows)
    cut = cut_batch(batch, CHUNK, PAGE, NULL)
    owners = [row for row, (_, count) in enumerate(rows) for _ in range(count)]
    token = 0
    for row, count in enumerate(cut.query_lens):
        kv_len = cut.kv_lens_host[row]
        pages = cut.block_table[row].tolist()
        for seen in range(kv_len - count + 1, kv_len + 1):
            position, owner = int(batch.positions[token]), owners[token]
            first = position // CHUNK * CHUNK
            assert seen == position - first + 1
            theirs = batch.block_table[owner].tolist()
            assert pages[: -(-seen // PAGE)] == theirs[first // PAGE : position // PAGE + 1]
            token += 1
        assert all(page == NULL for page in pages[-(-kv_len // PAGE) :])
    assert token == len(batch.positions)
    assert cut.qo_indptr.tolist() == torch.tensor([0, *cut.query_lens]).cumsum(0).tolist()
    assert cut.kv_lens.tolist() == cut.kv_lens_host
    assert cut.num_decodes == batch.num_decodes


def test_a_page_that_would_lie_in_two_chunks_is_refused(tmp_path: Path) -> None:
    model = save_tiny("llama4", tmp_path)  # its chunks have 16 tokens
    config = EngineConfig(model=str(model), device="cpu", kv_pages=8, page_size=32)
    said = r"page_size is 32, .* chunks of 16 tokens: expected a divisor of 16, or max_model_len of at most 16"
    with pytest.raises(ValueError, match=said):
        load_model(config)
    load_model(replace(config, max_model_len=16))


def test_contexts_within_one_chunk_are_not_cut() -> None:
    whole = ReferenceAttention(AttentionShape(2, 1, 32, PAGE, frozenset({None})))
    step = ChunkedAttention(whole, CHUNK, PAGE).prepare(batch_of([(3, 1), (0, 8)]), NULL)
    assert step.cut.batch is step.batch
