"""The `flashinfer` backend with doubles of its wrappers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import flashinfer
from engine.attention.base import AttentionShape, choose_backend
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kv_pages import store_kv
from engine.attention.reference import ReferenceAttention
from tests.engine.support.paged_kv import CPU, Heads, Paged

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SHAPE = AttentionShape(8, 2, 64, 16, frozenset({None}))

Install = Callable[[str], Any]


def assert_right(case: Paged) -> None:
    """Compare with attention written out and with the reference backend."""
    attended = case.attend(FlashInferAttention(case.shape))
    assert attended.is_contiguous()
    torch.testing.assert_close(attended.double(), case.expected(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(attended, case.attend(ReferenceAttention(case.shape)), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(
    "rows",
    [
        [(5, 1), (31, 1), (0, 1), (15, 1)],
        [(0, 9), (16, 20), (0, 16)],
        [(40, 1), (16, 1), (0, 3), (33, 1), (20, 14)],
    ],
    ids=["decodes", "prefills", "mixed"],
)
def test_it_computes_the_same_as_the_reference(
    install: Install, page_size: int, window: int | None, rows: list[tuple[int, int]]
) -> None:
    install("flashinfer")
    assert_right(Paged(rows, Heads(3, 1, 64), page_size, window, BF16))


@pytest.mark.parametrize("heads", [Heads(1, 2, 64), Heads(5, 1, 128), Heads(8, 1, 64)], ids=str)
def test_groups_of_any_size(install: Install, heads: Heads) -> None:
    """Groups of five are among them, which decode computes on tensor cores only."""
    install("flashinfer")
    assert_right(Paged([(12, 1), (3, 6)], heads, 16, None, torch.float16))


def test_one_plan_is_made_for_each_step_and_window_whatever_the_number_of_layers(install: Install) -> None:
    made = install("flashinfer").made
    case = Paged([(12, 1), (20, 6)], Heads(2, 1, 64), 16, None, BF16)
    shape = replace(case.shape, windows=frozenset({None, 7}))
    backend, reference = FlashInferAttention(shape), ReferenceAttention(shape)
    for _ in range(2):
        step, expected = (b.prepare(case.batch, case.pages.null_page) for b in (backend, reference))
        for window in (None, 7, None, 7, None):
            generator = torch.Generator().manual_seed(0)
            query, new = (torch.randn(7, n, 64, generator=generator).to(BF16) for n in (2, 1))
            store_kv(case.pages.layer(0), case.batch.slot_mapping, new, new)
            attended = step.attend(case.pages.layer(0), query, window)
            wanted = expected.attend(case.pages.layer(0), query, window)
            torch.testing.assert_close(attended, wanted, atol=0.03, rtol=0.02)
    assert len(made) == 4  # for decodes and prefills, under two windows
    assert [wrapper.plans for wrapper in made] == [2] * 4
    assert sorted(wrapper.runs for wrapper in made) == [2, 2, 3, 3]


def test_no_plan_is_replaced_while_a_step_may_use_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may be launched while the one before still runs, and a wrapper has only one plan."""
    made, waits = install("flashinfer").made, list[tuple[torch.device, list[int]]]()
    case = Paged([(12, 1)], Heads(2, 1, 64), 16, None, BF16)

    def fence(device: torch.device) -> Callable[[], None]:
        return lambda: waits.append((device, [wrapper.plans for wrapper in made]))

    monkeypatch.setattr(flashinfer, "fence", fence)
    backend = FlashInferAttention(case.shape)
    for _ in range(2):
        case.attend(backend)
    assert waits == [(CPU, []), (CPU, [1])]


@pytest.mark.parametrize(
    ("capability", "page_size", "asked"),
    [((10, 0), 16, "trtllm-gen"), ((10, 3), 64, "trtllm-gen"), ((10, 0), 128, "auto"), ((9, 0), 16, "auto")],
)
def test_prompts_on_blackwell_gpus_are_computed_by_the_kernels_made_for_them(
    install: Install,
    gpu: Callable[[tuple[int, int]], None],
    capability: tuple[int, int],
    page_size: int,
    asked: str,
) -> None:
    made = install("flashinfer").made
    gpu(capability)
    assert_right(Paged([(12, 1), (20, 6)], Heads(2, 1, 64), page_size, 7, BF16))
    assert {wrapper.is_decode: wrapper.backend for wrapper in made} == {True: "auto", False: asked}


@pytest.mark.parametrize("window", [None, 7])
def test_pages_in_fp8_with_their_scales(install: Install, window: int | None) -> None:
    """The step follows one on pages of the model's type, as when scales are calibrated."""
    install("flashinfer")
    case = Paged([(12, 1), (20, 6)], Heads(2, 1, 64), 16, window, BF16)
    shape = replace(case.shape, kv_dtype=torch.float8_e4m3fn)
    assert FlashInferAttention.unavailable(shape, BF16, CUDA) is None
    backend = FlashInferAttention(shape)
    case.attend(backend)
    pages, query = case.pages.layer(0).to(torch.float8_e4m3fn), torch.cat(case.queries)
    attended, expected = (
        each.prepare(case.batch, case.pages.null_page).attend(pages, query, window, (1.5, 0.75))
        for each in (backend, ReferenceAttention(shape))
    )
    torch.testing.assert_close(attended, expected, atol=0.03, rtol=0.02)


@pytest.mark.parametrize(
    ("capability", "dtype", "device", "head_dim", "reason"),
    [
        ((9, 0), BF16, "cpu", 64, "it runs on CUDA GPUs, not on cpu"),
        ((9, 0), torch.float32, "cuda", 64, "it computes in bfloat16 and float16, not in float32; set dtype"),
        ((9, 0), torch.float8_e4m3fn, "cuda", 64, "not in float8_e4m3fn"),
        ((7, 5), BF16, "cuda", 64, "it needs compute capability 8.0 or more; this GPU has 7.5"),
        ((9, 0), BF16, "cuda", 96, "head_dim must be one of 64, 128, 256; the model's is 96"),
    ],
)
def test_the_reason_why_a_shape_or_gpu_does_not_fit_is_given(
    install: Install,
    gpu: Callable[[tuple[int, int]], None],
    capability: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    head_dim: int,
    reason: str,
) -> None:
    install("flashinfer")
    gpu(capability)
    shape = replace(SHAPE, head_dim=head_dim)
    assert reason in str(FlashInferAttention.unavailable(shape, dtype, torch.device(device)))
    assert FlashInferAttention.unavailable(SHAPE, BF16, CUDA) is None or capability == (7, 5)


def test_an_error_names_the_package_to_install_if_it_is_asked_for_and_missing(install: Install) -> None:
    with pytest.raises(ValueError, match=r"flashinfer is not installed: pip install 'raydix\[flashinfer\]'"):
        choose_backend("flashinfer", SHAPE, BF16, CUDA)


def test_a_broken_or_too_old_package_is_reported(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flashinfer.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    reason = "it does not import: undefined symbol: _ZN3c10; reinstall it"
    assert reason in str(FlashInferAttention.unavailable(SHAPE, BF16, CUDA))
    (tmp_path / "flashinfer.py").write_text("class BatchDecodeWithPagedKVCacheWrapper: ...\n")
    reason = "it has no BatchPrefillWithPagedKVCacheWrapper"
    assert reason in str(FlashInferAttention.unavailable(SHAPE, BF16, CUDA))
