"""The step's metadata and the reference backend, compared with attention written out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import base
from engine.attention.base import AttentionShape, HybridAttention, choose_backend, preferred
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import FP8, MAX_FP8, store_kv
from engine.attention.reference import ReferenceAttention
from tests.engine.support.paged_kv import CPU, Heads, Paged, chunk

SHAPE = AttentionShape(4, 2, 64, 16, frozenset({None}))


def test_the_batch_of_two_decodes_and_a_prefill() -> None:
    chunks = [chunk(5, 1, [3, 0, 9]), chunk(0, 1, [2]), chunk(2, 3, [7, 1])]
    batch = AttentionBatch.from_chunks(chunks, page_size=4, null_page=10)
    assert batch.num_decodes == 2
    assert batch.query_lens == [1, 1, 3]
    assert batch.kv_lens_host == batch.kv_lens.tolist() == [6, 1, 5]
    assert batch.qo_indptr.tolist() == [0, 1, 2, 5]
    assert batch.block_table.tolist() == [[3, 0], [2, 10], [7, 1]]  # Page 9 holds nothing yet.
    assert batch.positions.tolist() == [5, 0, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [0 * 4 + 1, 2 * 4, 7 * 4 + 2, 7 * 4 + 3, 1 * 4]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 9, 33])), min_size=1, max_size=6),
    heads=st.sampled_from([Heads(1, 4, 8), Heads(2, 2, 8), Heads(6, 1, 8), Heads(6, 1, 8, latent=5)]),
    page_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([None, 1, 7, 40]),
    max_scores=st.sampled_from([1 << 22, 50]),
    free_padding=st.sampled_from([0, 512]),
    seed=st.integers(0, 1000),
)
def test_the_reference_backend(
    rows: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    window: int | None,
    max_scores: int,
    free_padding: int,
    seed: int,
) -> None:
    """The backend computes any mix of rows, also rows of one token behind prefill rows."""
    case = Paged(rows, heads, page_size, window, torch.float64, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.attention.reference._MAX_SCORES", max_scores)
        patch.setattr("engine.attention.reference._FREE_PADDING", free_padding)
        torch.testing.assert_close(case.attend(ReferenceAttention(case.shape)), case.expected())
    assert not case.pages.layer(0)[:, case.pages.null_page].any()


def test_pages_of_eight_bits_are_read_as_the_numbers_that_they_stand_for() -> None:
    """They give what pages of the model's type with the same numbers give; too large numbers are clamped."""
    case, scales = Paged([(70, 1), (9, 1), (20, 30)], Heads(2, 2, 8), 3, None, torch.float32), (0.25, 2**-9)
    divisors = torch.tensor(scales).view(2, 1, 1, 1, 1)
    pages = (case.pages.layer(0) / divisors).clamp(-MAX_FP8, MAX_FP8).to(FP8)
    step = ReferenceAttention(case.shape).prepare(case.batch, case.pages.null_page)
    key, value = case.new()
    store_kv(pages, case.batch.slot_mapping, key, value, scales)
    out = step.attend(pages, case.query(), None, scales)
    assert (pages[1].float().abs() == MAX_FP8).any()

    plain = case.pages.layer(0).copy_(pages.float() * divisors)
    key, value = (
        (new / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8).float() * scale
        for new, scale in zip(case.new(), scales, strict=True)
    )
    store_kv(plain, case.batch.slot_mapping, key, value)
    torch.testing.assert_close(out, step.attend(plain, case.query(), None))


def test_auto_takes_a_backend_that_runs_here() -> None:
    shape = AttentionShape(4, 2, 64, 16, frozenset({None}))
    assert choose_backend("auto", shape, torch.float32, CPU).name
    assert isinstance(choose_backend("reference", shape, torch.float32, CPU), ReferenceAttention)


@pytest.mark.parametrize(
    ("rows", "by"),
    [([(9, 1), (3, 1)], "decodes"), ([(9, 1), (7, 16)], "decodes"), ([(9, 1), (0, 17)], "prompts")],
)
def test_one_of_two_backends_computes_steps_with_prompts(rows: Sequence[tuple[int, int]], by: str) -> None:
    """All of a step's rows are computed by one backend, and graphs can hold decodes if theirs can. A few draft
    tokens, and whatever is recorded, are no prompts.
    """
    case = Paged(rows, Heads(2, 2, 32), 16, None, torch.float32)
    prepared: list[str] = []

    class Part(ReferenceAttention):
        def prepare(self, batch: AttentionBatch, null_page: int) -> Any:
            prepared.append(self.name)
            return super().prepare(batch, null_page)

    parts = Part(case.shape), Part(case.shape)
    for part, name in zip(parts, ("prompts", "decodes"), strict=True):
        part.name, part.is_capturable = name, name == "decodes"
        part.captures_prompts = part.is_capturable
    both = HybridAttention(*parts)
    assert (both.name, both.is_capturable, both.captures_prompts) == ("prompts,decodes", True, True)
    error = (case.attend(both).double() - case.expected()).abs().max()
    assert error < 1e-5 and prepared == [by]
    both.prepare(replace(case.batch, is_bounded=True), case.pages.null_page)
    assert prepared == [by, "decodes"]


def test_two_names_are_two_backends_and_each_is_checked() -> None:
    shape = AttentionShape(4, 2, 64, 16, frozenset({None}))
    assert choose_backend("reference, reference", shape, torch.float32, CPU).name == "reference,reference"
    for name, said in (("reference,magic", "'magic'"), ("flash_attn,reference", "flash_attn cannot run on cpu")):
        with pytest.raises(ValueError, match=said):
            choose_backend(name, shape, torch.float32, CPU)
    with pytest.raises(ValueError, match="two of them with a comma between them"):
        choose_backend("reference,reference,reference", shape, torch.float32, CPU)


@pytest.mark.parametrize(
    ("gpu", "usable", "expected", "why"),
    [
        (
            (9, 0),
            "triton cudnn reference",
            "cudnn,triton",
            "cuDNN.* Hopper GPUs, for many tokens.*Triton",
        ),
        ((9, 0), "triton flash_attn flashinfer cudnn reference", "cudnn,triton", "cuDNN has kernels for Hopper"),
        ((9, 0), "triton flash_attn flashinfer reference", "triton", r"no backend .* compute capability 9\.0"),
        ((9, 0), "flash_attn flashinfer reference", "reference", "the first .* that have run on a GPU"),
        ((10, 0), "triton flash_attn flashinfer cudnn reference", "triton", r"no backend .* capability 10\.0"),
        ((8, 0), "triton flash_attn flashinfer cudnn reference", "triton", r"no backend .* capability 8\.0"),
        (None, "triton flash_attn flashinfer reference", "triton", "the first .* that have run on a GPU"),
        (None, "flash_attn cudnn reference", "cudnn", "the first .* that have run on a GPU"),
    ],
)
def test_auto_chooses_among_backends_that_have_run_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: Any, usable: str, expected: str, why: str
) -> None:
    monkeypatch.setattr(base, "capability", lambda device: gpu)
    taken, said = preferred(usable.split(), torch.device("cuda"))
    assert taken == expected
    assert re.search(why, said)
    assert preferred(["native", "flash_attn"], CPU)[0] == "native"


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"'magic'.*auto, .*reference"):
        choose_backend("magic", AttentionShape(4, 2, 64, 16, frozenset({None})), torch.float32, CPU)
