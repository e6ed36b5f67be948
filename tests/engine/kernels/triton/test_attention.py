"""The Triton attention kernels compared with attention in float64, and their 8-bit pages with `reference`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from engine.attention import triton_step
from engine.attention.base import AttentionShape, choose_backend
from engine.attention.kv_pages import FP8, MAX_FP8, store_kv
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from engine.graphs.step_inputs import StepInputs
from engine.kernels.triton.extend import query_tiles
from engine.kernels.triton.extend_tma import TMA_ROWS, extend_tma, fitting_tile, tma_tile
from tests.engine.support.devices import DEVICE
from tests.engine.support.paged_kv import CPU, Heads, Paged

paged = partial(Paged, device=DEVICE)

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 0.04}
"""Largest error of outputs of size about 1, from rounding sums, and weights and results to the type."""
_DTYPES = tuple(_TOLERANCE)

Rows = Sequence[tuple[int, int]]
DECODES: Rows = [(0, 1), (63, 1), (64, 1), (300, 1)]
EXTENDS: Rows = [(0, 5), (63, 2), (100, 70), (0, 130)]
MIXED: Rows = [(200, 1), (9, 1), (0, 40), (129, 3), (5, 1)]


def assert_right(case: Paged) -> None:
    error = (case.attend(TritonAttention(case.shape)).double() - case.expected()).abs().max().item()
    assert error < _TOLERANCE[case.pages.data.dtype]
    assert not case.pages.layer(0)[:, case.pages.null_page].any()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("rows", [DECODES, EXTENDS, MIXED], ids=["decodes", "extends", "mixed"])
def test_a_batch_gets_the_right_attention(rows: Rows, dtype: torch.dtype) -> None:
    assert_right(paged(rows, Heads(2, 2, 32), 16, None, dtype))


@pytest.mark.parametrize(
    ("soft_cap", "has_sinks", "dtype"),
    [
        (0.5, False, torch.float32),
        (50.0, True, torch.float32),
        (None, True, torch.float32),
        (0.5, True, torch.float16),
        (50.0, True, torch.bfloat16),
    ],
)
def test_soft_caps_and_sinks(soft_cap: float | None, has_sinks: bool, dtype: torch.dtype) -> None:
    """In rows that are one item and in one that is merged of several, and in prompts."""
    rows: Rows = [*MIXED, (1500, 1)]
    assert_right(paged(MIXED, Heads(3, 1, 32), 16, 40, dtype, soft_cap=soft_cap, has_sinks=has_sinks))
    assert_right(paged(rows, Heads(3, 1, 32), 16, None, dtype, soft_cap=soft_cap, has_sinks=has_sinks))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and do not run on a CPU")
@pytest.mark.parametrize(("page_size", "tile"), [(64, (64, 3)), (128, (128, 2)), (256, (128, 2))])
@pytest.mark.parametrize("window", [None, 40, 300])
def test_prompts_whose_tiles_are_boxes(page_size: int, tile: tuple[int, int], window: int | None) -> None:
    """What lies in a box beside a row's KV is NaN here, and is not seen."""
    for dtype, heads in ((torch.float32, Heads(2, 2, 32)), (torch.bfloat16, Heads(3, 1, 16))):
        case = paged([(0, 5), (63, 2), (100, 70), (300, 1), (0, 130)], heads, page_size, window, dtype)
        layer, batch, query = case.pages.layer(0), case.batch, case.query()
        store_kv(layer, batch.slot_mapping, *case.new())
        tiles = torch.from_numpy(query_tiles(batch.query_lens, batch.kv_lens_host, 0, TMA_ROWS // heads.group))
        out = query.new_empty(len(query), heads.num * heads.dim)
        rows = batch.block_table, batch.qo_indptr, batch.kv_lens, tiles, out
        how = {"tile": tile, "scale": case.shape.scale, "window": window, "kv_scales": (1.0, 1.0)}
        extend_tma(query, layer, *rows, **how)  # type: ignore[arg-type]
        assert (out.double() - case.expected()).abs().max() < _TOLERANCE[dtype]


def test_boxes_are_for_pages_and_heads_that_fit() -> None:
    hopper = 227 * 1024
    assert fitting_tile(128, 128, 2, hopper) == fitting_tile(256, 128, 2, hopper) == (128, 2)
    assert fitting_tile(64, 128, 2, hopper) == (64, 3)
    assert fitting_tile(128, 128, 2, 100 * 1024) is None and fitting_tile(128, 64, 2, 100 * 1024) == (128, 2)
    assert fitting_tile(16, 128, 2, hopper) is None, "a tile would lie in several pages"
    assert fitting_tile(128, 256, 2, hopper) is None, "its accumulators would not stay in registers"
    assert tma_tile(128, 128, 2, CPU, is_unusual=False) is None


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("rows", "width"), [([(63, 3), (0, 5), (124, 2), (300, 1)], 5), ([(63, 2), (0, 2)], 65), (DECODES, 1)], ids=str
)
def test_recorded_rows_of_up_to_so_many_tokens(rows: Rows, width: int, window: int | None) -> None:
    """The host knows bounds alone; a tile may begin past a row's tokens, and rows and tokens are padded."""
    case = paged(rows, Heads(1, 8, 32), 16, window, torch.float32)
    store_kv(case.pages.layer(0), case.batch.slot_mapping, *case.new())
    query, num_rows = case.query(), len(rows) + 2
    inputs = StepInputs(num_rows * width, 0, DEVICE, num_rows, 40)
    inputs.write_tokens(torch.zeros(len(query), dtype=torch.int64, device=DEVICE), case.batch, num_rows * width)
    inputs.write_rows(case.batch, num_rows)
    bounded = inputs.batch(num_rows * width, num_rows, width, longest=640)
    padded = query.new_zeros(num_rows * width, *query.shape[1:])
    padded[: len(query)] = query
    step = TritonAttention(case.shape).prepare(bounded, case.pages.null_page)
    attended = step.attend(case.pages.layer(0), padded, window)[: len(query)]
    assert (attended.double() - case.expected()).abs().max() < 1e-5


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Any, ...]]]:
    """The arguments of each launch for rows with one token (`decode`) and for others (`extend`)."""
    seen: dict[str, list[tuple[Any, ...]]] = {"decode": [], "extend": []}

    def noting(launch: Callable[..., None], kind: str) -> Callable[..., None]:
        def noted(*args: Any, **options: Any) -> None:
            seen[kind].append(args)
            launch(*args, **options)

        return noted

    for name in ("decode", "extend", "extend_tma"):
        monkeypatch.setattr(triton_step, name, noting(getattr(triton_step, name), name.removesuffix("_tma")))
    return seen


def test_rows_of_one_item_need_no_parts(launched: dict[str, list[tuple[Any, ...]]]) -> None:
    """The program that attends writes their results itself, beside rows that are split and merged."""
    whole: Rows = [(63, 1), (5, 1), (0, 1)]
    for rows, is_split in ((whole, False), ([*whole, (1500, 1)], True)):
        case = paged(rows, Heads(2, 1, 32), 16, None, torch.float32)
        step = TritonAttention(case.shape).prepare(case.batch, case.pages.null_page)
        store_kv(case.pages.layer(0), case.batch.slot_mapping, *case.new())
        step.attend(case.pages.layer(0), case.query(), None)
        _, _, _, _, _, parts, *_ = launched["decode"][-1]
        parts.values.fill_(torch.nan)
        out = step.attend(case.pages.layer(0), case.query(), None)
        assert (out.double() - case.expected()).abs().max() < 1e-5
        items = parts.values.isfinite().flatten(1).any(1).sum().item()
        assert items == 0 if not is_split else items >= 2


FEW_AFTER_MANY: Rows = [(600, 5), (700, 8), (512, 3)]


@pytest.mark.parametrize(
    ("rows", "num_tokens", "has_rest"),
    [
        (FEW_AFTER_MANY, 16, False),
        ([(300, 1), (520, 1), *FEW_AFTER_MANY[:2], (9, 30), (600, 5)], 15, True),
        ([(511, 5), (600, 5)], 0, True),
        ([(600, 5), (600, 9)], 5, True),
        ([(530, 1)] * 10 + [(600, 8), (600, 8)], 18, True),
    ],
    ids=["all", "some", "after too few", "too many", "too many rows"],
)
def test_a_few_tokens_after_many_share_these_as_rows_of_their_own(
    rows: Rows,
    num_tokens: int,
    has_rest: bool,
    launched: dict[str, list[tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("_FEW_TOKENS", 8), ("_MANY_POSITIONS", 512), ("_MOST_ROWS", 20)):
        monkeypatch.setattr(triton_step, name, value)
    case = paged(rows, Heads(2, 1, 16), 16, None, torch.float32)
    assert_right(case)
    step = TritonAttention(case.shape).prepare(case.batch, case.pages.null_page)
    for launches in launched.values():
        launches.clear()
    step.attend(case.pages.layer(0), case.query(), None)
    assert sum(len(kv_lens) for _, _, _, kv_lens, *_ in launched["decode"]) == num_tokens
    assert bool(launched["extend"]) == has_rest
    for _, _, _, _, work, *_ in launched["decode"]:
        assert work.groups is not None and int((work.groups.tiles > 0).sum()) >= 5
    alone = paged(rows, Heads(2, 1, 16), 16, None, torch.float32)
    alone.shape = replace(alone.shape, is_cascade=False)
    assert_right(alone)


@pytest.mark.parametrize("window", [1, 7, 64, 100])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_windows_and_page_sizes(page_size: int, window: int) -> None:
    assert_right(paged([(200, 1), (9, 1), (70, 90)], Heads(2, 1, 32), page_size, window, torch.float32))


@pytest.mark.parametrize("page_size", [1, 3, 5, 48, 64])
def test_page_sizes(page_size: int) -> None:
    assert_right(paged(MIXED, Heads(1, 2, 32), page_size, None, torch.float32))


@pytest.mark.parametrize(
    "heads",
    [Heads(1, 1, 256), Heads(4, 2, 64), Heads(3, 1, 80), Heads(7, 2, 96), Heads(24, 1, 40), Heads(71, 1, 32)],
    ids=lambda heads: f"{heads.group}x{heads.num_kv_heads}x{heads.dim}",
)
def test_heads_of_any_number_and_size_get_the_right_attention(heads: Heads) -> None:
    """Some groups fill no block, some blocks hold no whole number of groups, some sizes are no power of two."""
    assert_right(paged([(130, 1), (60, 9)], heads, 16, None, torch.float32))


@pytest.mark.parametrize("page_size", [3, 16])
def test_pages_with_heads_outside_positions(page_size: int) -> None:
    case = paged(MIXED, Heads(2, 3, 32), page_size, None, torch.float32)
    expected = case.attend(TritonAttention(case.shape))
    pages = case.pages.layer(0).transpose(2, 3).contiguous().transpose(2, 3)
    assert pages.stride(2) < pages.stride(3)
    step = TritonAttention(case.shape).prepare(case.batch, case.pages.null_page)
    assert torch.equal(step.attend(pages, case.query(), None), expected)


def test_queries_as_a_view_of_one_projection() -> None:
    case = paged(MIXED, Heads(2, 2, 32), 16, None, torch.float32)
    expected = case.attend(TritonAttention(case.shape))
    query = torch.cat((case.query(), *case.new()), dim=1)[:, : case.shape.num_heads]
    step = TritonAttention(case.shape).prepare(case.batch, case.pages.null_page)
    assert torch.equal(step.attend(case.pages.layer(0), query, None), expected)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 33])
def test_pages_of_eight_bits(dtype: torch.dtype, window: int | None) -> None:
    """The result is that of `reference`, which has its own test."""
    case, scales = paged(MIXED, Heads(2, 2, 32), 3, window, dtype), (0.25, 2**-9)
    pages = (
        (case.pages.layer(0).float() / torch.tensor(scales, device=DEVICE).view(2, 1, 1, 1, 1))
        .clamp(-MAX_FP8, MAX_FP8)
        .to(FP8)
    )
    key, value = case.new()
    store_kv(pages, case.batch.slot_mapping, key, value, scales)
    triton, reference = (
        backend.prepare(case.batch, case.pages.null_page).attend(pages, case.query(), window, scales)
        for backend in (TritonAttention(case.shape), ReferenceAttention(case.shape))
    )
    assert (triton - reference).abs().max() < _TOLERANCE[dtype]


def test_a_padded_row_attends_to_a_page_of_its_own() -> None:
    """Padded rows of fixed-size batches have one position, on the null page, or none at all."""
    case = paged([(70, 1), (0, 1), (3, 1)], Heads(2, 2, 32), 16, None, torch.float32)
    expected = case.alone(0).expected()
    case.batch.block_table[1:], case.batch.slot_mapping[1:] = case.pages.null_page, case.batch.slot_mapping[0]
    case.batch.kv_lens[2] = 0
    key, value = case.new()
    key[1:], value[1:] = key[0], value[0]
    store_kv(case.pages.layer(0), case.batch.slot_mapping, key, value)
    step = TritonAttention(case.shape).prepare(case.batch, case.pages.null_page)
    out = step.attend(case.pages.layer(0), case.query(), None).double()
    torch.testing.assert_close(out[:1], expected, atol=1e-5, rtol=0)
    assert not out[1:].any()  # One row saw the null page's values, the other none.


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shape = AttentionShape(4, 2, 64, 16, frozenset({None}))
    with pytest.raises(ValueError, match="triton cannot run on cpu: triton: it runs on GPUs"):
        choose_backend("triton", shape, torch.float32, CPU)


def test_without_triton_an_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.triton.find_spec", lambda name: None)
    shape = AttentionShape(4, 2, 64, 16, frozenset({None}))
    with pytest.raises(ValueError, match="pip install triton"):
        choose_backend("triton", shape, torch.float32, CPU)
