"""The `cudnn` backend, with torch's kernels for CPUs in place of cuDNN's, and the reference in Triton's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from engine.attention import cudnn
from engine.attention.base import AttentionShape, choose_backend
from engine.attention.cudnn import CudnnAttention
from engine.attention.kv_pages import FP8
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from tests.engine.support.paged_kv import CPU, Heads, Paged

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SHAPE = AttentionShape(8, 2, 64, 16, frozenset({None}))


def attend_with_sums(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the function of this name in `engine.attention.cudnn` asks of cuDNN."""
    keys, values = (kind.repeat_interleave(queries.shape[1] // kind.shape[1], 1) for kind in (keys, values))
    scores = queries @ keys.transpose(2, 3) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)[0]


def merge(one: torch.Tensor, sums: torch.Tensor, two: torch.Tensor, more: torch.Tensor, out: torch.Tensor) -> None:
    """What the kernel of this name computes."""
    total = torch.logaddexp(sums, more)
    merged = one * (sums - total).exp()[..., None] + two * (more - total).exp()[..., None]
    out.copy_(merged.transpose(0, 1).flatten(1))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run on a CPU; the list gets the number of tokens of each call of cuDNN with a mask, padding included."""
    lengths: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        if options.get("is_causal"):
            assert query.shape[2] == rest[0].shape[2] and options["enable_gqa"]
            lengths.append(query.shape[2])
        return attention(query, *rest, **options)  # type: ignore[arg-type]

    def noted_with_sums(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if is_causal:
            lengths.append(queries.shape[2])
        assert queries.shape[2] % 8 == 0 and keys.shape[2] % 8 == 0, "there are few lengths"
        return attend_with_sums(queries, keys, values, scale, is_causal=is_causal)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(cudnn, "attend_with_sums", noted_with_sums)
    monkeypatch.setattr("engine.kernels.triton.merge.merge", merge)
    monkeypatch.setattr(cudnn, "_KERNELS", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
    monkeypatch.setattr(cudnn, "TritonAttention", ReferenceAttention)
    for name, size in (("SHORTEST", 12), ("_MULTIPLE", 8), ("_CUT", 16)):
        monkeypatch.setattr(cudnn, name, size)
    return lengths


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([(0, 40)], [40]),
        ([(0, 41)], [48]),
        ([(5, 1), (31, 1), (0, 13), (15, 14), (0, 6), (0, 30)], [16, 32]),
        ([(5, 1), (20, 11), (0, 11)], []),
        ([(16, 16)], [16]),
        ([(31, 12)], [32]),
        ([(40, 1), (3, 5), (50, 37), (0, 20), (20, 14)], [40, 24, 24]),
    ],
)
def test_prompts_with_many_tokens_in_a_step_are_computed_by_cudnn(
    asked: list[int], rows: Sequence[tuple[int, int]], lengths: Sequence[int], page_size: int
) -> None:
    """All rows get what attention written out gives, whoever computes them, wherever they lie in the batch."""
    case = Paged(rows, Heads(3, 2, 16), page_size, None, torch.float32)
    torch.testing.assert_close(
        case.attend(CudnnAttention(case.shape)).double(), case.expected(), atol=1e-5, rtol=1e-4
    )
    assert asked == lengths


def test_after_prompts_of_the_planned_lengths_no_whole_prompt_needs_another_plan(asked: list[int]) -> None:
    def attend(length: int) -> None:
        case = Paged([(0, length)], Heads(3, 2, 16), 16, None, torch.float32)
        case.attend(CudnnAttention(case.shape))

    for longest, num_plans in ((11, 0), (12, 1), (40, 4), (41, 5)):
        asked.clear()
        for length in cudnn.planned_lengths(longest):
            attend(length)
        planned = set(asked)
        for length in range(1, longest + 1):
            attend(length)
        assert planned == set(asked) and len(planned) == num_plans


def test_layers_with_a_window_and_recorded_steps_are_left_to_triton(asked: list[int]) -> None:
    case = Paged([(5, 1), (0, 40)], Heads(3, 2, 16), 16, 7, torch.float32)
    backend = CudnnAttention(replace(case.shape, windows=frozenset({None, 7})))
    torch.testing.assert_close(case.attend(backend).double(), case.expected(), atol=1e-5, rtol=1e-4)
    case = Paged([(0, 40)], Heads(3, 2, 16), 16, None, torch.float32)
    case.batch = replace(case.batch, is_bounded=True)
    case.attend(CudnnAttention(case.shape))
    assert asked == []


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (replace(SHAPE, soft_cap=50.0), BF16, "scores with a soft cap"),
        (replace(SHAPE, has_sinks=True), BF16, "sinks"),
        (replace(SHAPE, windows=frozenset({128})), BF16, "all of these have one"),
        (replace(SHAPE, kv_dtype=FP8), BF16, "does not support pages in fp8"),
        (replace(SHAPE, head_dim=256), BF16, "up to 128; the model's is 256"),
        (SHAPE, torch.float32, "not in float32"),
    ],
)
def test_the_reason_why_a_shape_does_not_fit_is_given(
    shape: AttentionShape, dtype: torch.dtype, reason: str
) -> None:
    assert reason in str(CudnnAttention.unavailable(shape, dtype, CUDA))


def test_it_needs_cudnn_and_a_gpu_that_triton_runs_on(
    gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0))
    monkeypatch.setattr(TritonAttention, "unavailable", lambda shape, dtype, device: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert "it needs cuDNN 9.1 or later" in str(CudnnAttention.unavailable(SHAPE, BF16, CUDA))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for version, is_enough in ((8907, False), (91002, True)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert (CudnnAttention.unavailable(SHAPE, BF16, CUDA) is None) == is_enough
    monkeypatch.setattr(TritonAttention, "unavailable", lambda shape, dtype, device: "a reason")
    assert "Triton would compute its other rows: a reason" in str(CudnnAttention.unavailable(SHAPE, BF16, CUDA))
    gpu((7, 5))
    assert "this GPU has 7.5" in str(CudnnAttention.unavailable(SHAPE, BF16, CUDA))
    with pytest.raises(ValueError, match="cudnn cannot run on cpu: cudnn: it runs on CUDA GPUs"):
        choose_backend("cudnn", SHAPE, BF16, CPU)
