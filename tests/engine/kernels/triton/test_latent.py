"""Latent KV (MLA) by the Triton kernels: all query heads share one key, whose first numbers are the value."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from engine.attention import triton_step
from engine.attention.base import AttentionShape, preferred
from engine.attention.kv_pages import FP8, MAX_FP8, store_kv
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from engine.graphs.setup import graph_bytes
from engine.kernels.triton import launch_config
from engine.kernels.triton.cascade import attend_shared
from engine.kernels.triton.decode import Parts, decode_config
from engine.kernels.triton.extend import extend_config
from engine.kernels.triton.kv_heads import KVHeads
from engine.kernels.triton.shared_prefixes import RowGroups
from engine.kernels.triton.work_list import WorkList
from engine.model_config.config import ModelConfig
from engine.model_parts.parts import LatentAttentionConfig
from engine.settings.config import EngineConfig
from tests.engine.support.devices import DEVICE
from tests.engine.support.oracle import save_tiny
from tests.engine.support.paged_kv import CPU, Heads, Paged
from tests.engine.support.shared_pages import SharedPages, SharingRow

paged = partial(Paged, device=DEVICE)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 0.04}
MIXED = [(200, 1), (9, 1), (0, 40), (129, 3), (5, 1)]


def assert_right(case: Paged) -> None:
    out = case.attend(TritonAttention(case.shape))
    assert (out.double() - case.expected()).abs().max() < _TOLERANCE[case.pages.data.dtype]


@settings(max_examples=25, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 200), max_size=4),
    prompts=st.lists(st.tuples(st.integers(0, 100), st.integers(2, 40)), max_size=2),
    heads=st.sampled_from([Heads(1, 1, 24, 16), Heads(5, 1, 40, 32), Heads(20, 1, 30, 20), Heads(40, 1, 48, 32)]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(list(_TOLERANCE)),
    seed=st.integers(0, 9),
)
def test_any_batch_gets_the_right_attention(
    decodes: list[int],
    prompts: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """More than 32 heads are cut into blocks, and some sizes are no power of two."""
    rows = [(length, 1) for length in decodes] + prompts
    if rows:
        assert_right(paged(rows, heads, page_size, None, dtype, seed))


@pytest.mark.parametrize("heads", [Heads(16, 1, 576, 512), Heads(34, 1, 24, 16)], ids=lambda heads: str(heads.num))
def test_published_sizes_and_blocks_of_heads(heads: Heads) -> None:
    """A row is cut into pieces and merged, one has a token only, and one has several."""
    assert_right(paged([(700, 1), (0, 1), (66, 9)], heads, 64, None, torch.float32))


def test_blocks_of_heads_read_the_same_kv() -> None:
    for num_heads, count in ((1, 1), (16, 1), (32, 1), (40, 2), (128, 4), (37, 37)):
        heads = KVHeads.of(num_heads, 1, 576, 512)
        assert (heads.count, heads.group, heads.rest) == (count, num_heads // count, 64)
    pages = torch.empty(1, 3, 16, 1, 576)
    assert heads.kv_strides(pages) == (16 * 576, 576, 0)
    assert KVHeads.of(8, 2, 64).kv_strides(torch.empty(2, 3, 16, 2, 64)) == (16 * 128, 128, 64)


def test_a_row_without_positions_gets_zeros() -> None:
    case = paged([(70, 1), (0, 1), (3, 1)], Heads(4, 1, 24, 16), 16, None, torch.float32)
    expected = case.alone(0).expected()
    case.batch.block_table[1:], case.batch.slot_mapping[1:] = case.pages.null_page, case.batch.slot_mapping[0]
    case.batch.kv_lens[2] = 0
    (key,) = case.new()
    key[1:] = key[0]
    store_kv(case.pages.layer(0), case.batch.slot_mapping, key, None)
    step = TritonAttention(case.shape).prepare(case.batch, case.pages.null_page)
    out = step.attend(case.pages.layer(0), case.query(), None).double()
    torch.testing.assert_close(out[:1], expected, atol=1e-5, rtol=0)
    assert not out[1:].any()  # One row saw the null page's values, the other none.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_of_eight_bits(dtype: torch.dtype) -> None:
    """The result is that of `reference`: the scale of keys is that of values, too."""
    case, scales = paged(MIXED, Heads(20, 1, 40, 32), 3, None, dtype), (0.25, 2**-9)
    pages = (case.pages.layer(0).float() / scales[0]).clamp(-MAX_FP8, MAX_FP8).to(FP8)
    store_kv(pages, case.batch.slot_mapping, case.new()[0], None, scales)
    triton, reference = (
        backend.prepare(case.batch, case.pages.null_page).attend(pages, case.query(), None, scales)
        for backend in (TritonAttention(case.shape), ReferenceAttention(case.shape))
    )
    assert (triton - reference).abs().max() < _TOLERANCE[dtype]


@pytest.mark.parametrize(("num_heads", "num_parts"), [(10, 1), (16, 2), (35, 1), (32, 0)])
def test_rows_that_share_a_prefix_get_the_same_together_as_separately(
    num_heads: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has 32 queries: of 10 heads, or a block of 7 of 35, those of three rows; of 16 heads those of two,
    so that three rows are two parts; of 32 heads those of one row.
    """
    leaders: list[set[int]] = []

    def noting(*args: Any, **options: Any) -> None:
        groups = next(arg for arg in args if isinstance(arg, WorkList)).groups
        assert groups is not None
        leaders.append(set(groups.leaders.tolist()) - {-1})
        attend_shared(*args, **options)

    monkeypatch.setattr(triton_step, "attend_shared", noting)
    rows = [SharingRow(0, 36, 3), SharingRow(0, 36, 64), SharingRow(1, 2, 9), SharingRow(0, 36, 20)]
    case = SharedPages(rows, Heads(num_heads, 1, 40, 32), 16, device=DEVICE)
    together, alone = (
        TritonAttention(replace(case.shape, is_cascade=is_cascade)).prepare(case.batch, case.pages.null_page)
        for is_cascade in (True, False)
    )
    found = case.attend_by(together)
    assert [len(parts) for parts in leaders] == ([num_parts] if num_parts else [])
    assert (found - case.attend_by(alone)).abs().max() < 2e-6
    assert TritonAttention(case.shape).spreads_prompts == (num_parts > 0)


@pytest.mark.parametrize(("shared_kib", "expected"), [(227, (32, 5)), (163, (32, 3)), (99, (16, 3)), (64, None)])
def test_programs_fit_into_shared_memory(
    shared_kib: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of H100, A100, L4 and T4. One tile at least is in shared memory, and one of 16 heads fills 16 rows."""
    monkeypatch.setattr(launch_config, "shared_memory", lambda device: shared_kib * 1024)
    heads = KVHeads.of(16, 1, 576, 512)
    program, prompt = decode_config(heads, 2, DEVICE), extend_config(heads, 2, 100, DEVICE)
    assert (prompt and (prompt.rows, prompt.num_stages)) == expected
    assert (program and program.rows) == (expected and 16)


def test_attention_is_by_these_kernels_and_can_be_recorded() -> None:
    shape = AttentionShape(16, 1, 576, 64, frozenset({None}), latent=512)
    assert TritonAttention.unavailable(shape, torch.bfloat16, DEVICE) is None
    assert TritonAttention(shape).is_capturable and TritonAttention(shape).captures_prompts
    assert preferred(["triton", "reference"], torch.device("cuda"))[0] == "triton"


def test_their_partial_results_are_counted_for_graphs(tmp_path: Path) -> None:
    """Those of 256 rows take 76 MiB on an H100 for 16 heads of 512 numbers."""
    facts, config = ModelConfig.from_directory(save_tiny("deepseek_v3", tmp_path)), EngineConfig(max_running=256)
    latent = facts.attention
    assert isinstance(latent, LatentAttentionConfig)
    wider = replace(facts, attention=replace(latent, rank=latent.rank + 1))
    counted = graph_bytes(config, wider, 2, 512) - graph_bytes(config, facts, 2, 512)
    capacity = WorkList(256, 1, 132, CPU, RowGroups(256, 64, 2, CPU), 132).capacity
    parts = Parts(capacity, KVHeads(1, 16, 512, 64), CPU).values.nbytes
    assert parts <= counted * 512 * 16 / latent.num_heads <= 1.3 * parts
