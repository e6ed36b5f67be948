"""The `flash_attn` backend with doubles of its packages: the arguments of calls, and which package is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.attention.base import AttentionShape, choose_backend
from engine.attention.flash_attn import FlashAttention
from engine.attention.flash_packages import PACKAGES
from engine.attention.reference import ReferenceAttention
from tests.engine.support.paged_kv import Heads, Paged

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SHAPE = AttentionShape(8, 2, 64, 256, frozenset({None}))
MODULES = [package.module for package in PACKAGES]
PAGE_SIZES = [
    (package.module, size)
    for package in PACKAGES
    for size in {package.page_multiple, 16, 256}
    if size % package.page_multiple == 0
]

Install = Callable[[str], Any]


def assert_right(case: Paged) -> None:
    """Compare with attention written out and with the reference backend."""
    attended = case.attend(FlashAttention(case.shape))
    assert attended.is_contiguous() and attended.shape == (
        sum(case.batch.query_lens),
        case.shape.num_heads * case.shape.head_dim,
    )
    torch.testing.assert_close(attended.double(), case.expected(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(attended, case.attend(ReferenceAttention(case.shape)), atol=0.03, rtol=0.02)


@pytest.mark.parametrize(("module", "page_size"), PAGE_SIZES)
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(
    "rows",
    [
        [(5, 1), (31, 1), (0, 1)],
        [(0, 9), (16, 20)],
        [(40, 1), (16, 1), (0, 3), (33, 1), (20, 14)],
    ],
    ids=["decodes", "prefills", "mixed"],
)
def test_every_package_computes_the_same_as_the_reference(
    install: Install, module: str, page_size: int, window: int | None, rows: list[tuple[int, int]]
) -> None:
    install(module)
    assert_right(Paged(rows, Heads(3, 2, 16), page_size, window, BF16))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("heads", [Heads(1, 3, 8), Heads(8, 1, 24)], ids=str)
def test_with_and_without_groups_in_float16(install: Install, module: str, heads: Heads) -> None:
    install(module)
    assert_right(Paged([(12, 1), (3, 6)], heads, 256, None, torch.float16))


@pytest.mark.parametrize("module", MODULES)
def test_a_layer_is_one_call_for_decodes_and_one_for_the_rest(install: Install, module: str) -> None:
    double = install(module)
    case = Paged([(12, 1), (20, 1), (3, 6)], Heads(2, 1, 8), 256, None, BF16)
    case.attend(FlashAttention(case.shape))
    decode, prefill = sorted((call for f in double.functions for call in f.calls), key=lambda call: len(call["q"]))
    assert len(decode["q"]) == 2 and len(prefill["q"]) == 6
    assert decode.get("max_seqlen_q", 1) == 1 and prefill["max_seqlen_q"] == 6


@pytest.mark.parametrize("module", MODULES)
def test_calls_are_planned_for_the_bounds_of_the_step(install: Install, module: str) -> None:
    """Recorded steps say how long their rows get, and there is a graph for each of a few such lengths."""
    double = install(module)
    case = Paged([(12, 1), (20, 3)], Heads(2, 1, 8), 256, None, BF16)
    for bound in (max(case.batch.kv_lens_host), 1024):
        case.batch = replace(case.batch, kv_lens_host=[bound, bound])
        case.attend(FlashAttention(case.shape))
        last = [function.calls[-1] for function in double.functions if function.calls]
        assert {call.get("max_seqlen_k", bound) for call in last} == {bound}
    assert FlashAttention.plans_by_bounds


def test_vllm_gets_the_generation_of_kernels_that_the_gpu_has(install: Install) -> None:
    double = install("vllm.vllm_flash_attn")
    case = Paged([(12, 1)], Heads(2, 1, 8), 16, None, BF16)
    for best in (3, 2):
        double.is_fa_version_supported = lambda version, device=None, best=best: version <= best
        case.attend(FlashAttention(case.shape))
        assert double.flash_attn_varlen_func.calls[-1]["fa_version"] == best
    double.is_fa_version_supported = lambda version, device=None: False
    double.fa_version_unsupported_reason = lambda version, device=None: "FA2 is unavailable due to: a test"
    assert "vllm.vllm_flash_attn: FA2 is unavailable due to: a test" in str(
        FlashAttention.unavailable(SHAPE, BF16, CUDA)
    )


@pytest.mark.parametrize("first", range(len(MODULES)))
def test_the_first_package_that_imports_is_used(install: Install, first: int) -> None:
    doubles = [install(module) for module in MODULES[first:]]
    case = Paged([(12, 1)], Heads(2, 1, 8), 256, None, BF16)
    case.attend(FlashAttention(case.shape))
    assert [any(f.calls for f in double.functions) for double in doubles] == [True] + [False] * (len(doubles) - 1)


def test_a_package_that_does_not_fit_is_passed_over(
    install: Install, gpu: Callable[[tuple[int, int]], None]
) -> None:
    """FlashAttention-3 has no kernels for an A100, so another installed package is chosen."""
    gpu((8, 0))
    hopper, other = install("flash_attn_interface"), install("flash_attn")
    case = Paged([(12, 1)], Heads(2, 1, 8), 256, None, BF16)
    case.attend(FlashAttention(case.shape))
    assert other.functions[0].calls and not any(function.calls for function in hopper.functions)


@pytest.mark.parametrize(
    ("module", "capability", "shape", "reason"),
    [
        ("flash_attn_interface", (8, 0), SHAPE, "needs compute capability 9.0, below 10.0; this GPU has 8.0"),
        ("flash_attn_interface", (10, 0), SHAPE, "needs compute capability 9.0, below 10.0; this GPU has 10.0"),
        ("vllm_flash_attn", (10, 0), SHAPE, "needs compute capability 8.0, below 10.0; this GPU has 10.0"),
        ("vllm.vllm_flash_attn", (7, 5), SHAPE, "needs compute capability 8.0; this GPU has 7.5"),
        ("flash_attn", (7, 5), SHAPE, "needs compute capability 8.0; this GPU has 7.5"),
        (
            "flash_attn",
            (9, 0),
            AttentionShape(8, 2, 64, 16, frozenset({None})),
            "page_size must be a multiple of 256 for flash_attn 2.x, not 16; set page_size: 256, or install "
            "FlashAttention-3 (any) or vllm (multiples of 16)",
        ),
        (
            "flash_attn",
            (8, 0),
            AttentionShape(8, 2, 64, 1, frozenset({None})),
            "page_size must be a multiple of 256 for flash_attn 2.x, not 1; set page_size: 256, or install "
            "vllm (multiples of 16)",
        ),
        (
            "vllm_flash_attn",
            (9, 0),
            AttentionShape(8, 2, 64, 24, frozenset({7})),
            "page_size must be a multiple of 16 for vllm-flash-attn, not 24; set page_size: 16, or install "
            "FlashAttention-3 (any)",
        ),
        (
            "flash_attn_interface",
            (9, 0),
            AttentionShape(8, 2, 12, 16, frozenset({None})),
            "head_dim must be a multiple of 8 up to 256; the model's is 12",
        ),
        (
            "flash_attn",
            (9, 0),
            AttentionShape(8, 2, 512, 256, frozenset({None})),
            "head_dim must be a multiple of 8 up to 256; the model's is 512",
        ),
    ],
)
def test_the_reason_why_a_shape_or_gpu_does_not_fit_is_given(
    install: Install,
    gpu: Callable[[tuple[int, int]], None],
    module: str,
    capability: tuple[int, int],
    shape: AttentionShape,
    reason: str,
) -> None:
    gpu(capability)
    install(module)
    said = str(FlashAttention.unavailable(shape, BF16, CUDA))
    assert said.startswith(f"{module}: ") and said.endswith(reason)
    with pytest.raises(RuntimeError, match="flash_attn cannot run"):
        FlashAttention(shape).prepare(Paged([(1, 1)], Heads(1, 1, 8), 16, None, BF16).batch, 0)


def test_it_runs_on_gpus_in_half_precision_only(install: Install) -> None:
    install("flash_attn")
    assert FlashAttention.unavailable(SHAPE, BF16, torch.device("cpu")) == "it runs on CUDA GPUs, not on cpu"
    for dtype in (torch.float32, torch.float8_e4m3fn):
        assert "bfloat16 and float16, not in float" in str(FlashAttention.unavailable(SHAPE, dtype, CUDA))
    assert FlashAttention.unavailable(SHAPE, BF16, CUDA) is None
    in_fp8 = replace(SHAPE, kv_dtype=torch.float8_e4m3fn)
    assert "set kv_dtype to auto" in str(FlashAttention.unavailable(in_fp8, BF16, CUDA))
    assert FlashAttention.unavailable(replace(SHAPE, kv_dtype=BF16), BF16, CUDA) is None


def test_scores_that_its_calls_do_not_support_are_refused(install: Install) -> None:
    """Soft caps (Gemma 2) and sinks (gpt-oss) are not among the arguments: they would be left out."""
    install("flash_attn_interface")
    for shape, what in (
        (replace(SHAPE, soft_cap=50.0), "soft cap"),
        (replace(SHAPE, has_sinks=True), "sinks"),
        (replace(SHAPE, latent=32), "MLA"),
    ):
        assert what in str(FlashAttention.unavailable(shape, BF16, CUDA))


def test_an_error_names_the_package_to_install_if_it_is_asked_for_and_missing(install: Install) -> None:
    with pytest.raises(
        ValueError, match=r"flash_attn cannot run on cuda: .* is installed: .*raydix\[flash-attn\]"
    ):
        choose_backend("flash_attn", SHAPE, BF16, CUDA)


def test_a_broken_package_is_reported_with_the_cause(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package built for another torch fails when it is imported, and the backend says how."""
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.syspath_prepend(tmp_path)
    for error in ("ImportError('undefined symbol: _ZN3c10')", "OSError('libcudart.so.11.0: cannot open')"):
        (tmp_path / "flash_attn.py").write_text(f"raise {error}\n")
        assert "flash_attn: it does not import: " in str(FlashAttention.unavailable(SHAPE, BF16, CUDA))
    (tmp_path / "flash_attn.py").write_text("import a_package_that_is_nowhere\n")
    said = str(FlashAttention.unavailable(SHAPE, BF16, CUDA))
    assert "No module named 'a_package_that_is_nowhere'; reinstall it for torch" in said


def test_a_version_with_another_signature_is_not_called(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = ModuleType("flash_attn")  # such as a namespace with only the fourth generation in it
    monkeypatch.setitem(sys.modules, "flash_attn", empty)
    assert "it has no flash_attn_with_kvcache" in str(FlashAttention.unavailable(SHAPE, BF16, CUDA))
    old: Any = install("flash_attn")
    old.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: q
    reason = str(FlashAttention.unavailable(SHAPE, BF16, CUDA))
    assert "its flash_attn_varlen_func has no argument block_table, softmax_scale, causal, window_size" in reason
