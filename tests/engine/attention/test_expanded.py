"""Rows of many tokens whose latent KV is expanded get what they get by absorbed queries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.attention import expanded
from engine.attention.base import AttentionShape
from engine.attention.expanded import ExpandedStep, ExpandingAttention, HeadsQuery
from engine.attention.kv_pages import FP8, MAX_FP8, UNSCALED, store_kv
from engine.attention.reference import ReferenceAttention
from engine.runner.model_runner import ModelRunner
from tests.engine.support.absorbed import absorbing
from tests.engine.support.oracle import save_tiny
from tests.engine.support.paged_kv import Heads, Paged
from tests.engine.support.runner_parts import with_attention
from tests.engine.support.steps_by_hand import RequestByHand, load_runner, pages_of, random_prompt, run_step

RANK, ROPE, PLAIN, VALUE, HEADS = 12, 4, 10, 6, 5


@pytest.fixture(autouse=True)
def few_tokens_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are expanded in turn if there are more than 33 positions."""
    monkeypatch.setattr(expanded, "MOST_ABSORBED", 7)
    monkeypatch.setattr(expanded, "_POSITIONS", 100)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    "rows",
    [[(0, 8)], [(70, 30)], [(9, 1), (40, 1), (3, 5), (60, 9), (0, 40), (7, 2)], [(0, 33), (20, 34)]],
    ids=["new", "after others", "among others", "all"],
)
def test_values_are_those_of_absorbed_queries(
    rows: list[tuple[int, int]], is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never by cuDNN, which plans for each new length."""
    takes_cudnn: list[bool] = []
    multiply = F.linear  # it expands heads, just before attention

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        takes_cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        return multiply(*args, **options)

    monkeypatch.setattr(F, "linear", noting)
    case = Paged(rows, Heads(HEADS, 1, RANK + ROPE, RANK), 3, None, torch.float64)
    scales = (0.25, 1.0) if is_fp8 else UNSCALED
    pages = case.pages.layer(0)
    if is_fp8:
        pages = (pages / scales[0]).clamp(-MAX_FP8, MAX_FP8).to(FP8)
    store_kv(pages, case.batch.slot_mapping, case.new()[0], None, scales)
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    count, expansion = len(case.query()), random(HEADS, PLAIN + VALUE, RANK)
    query = HeadsQuery(random(count, HEADS, PLAIN), random(count, HEADS, ROPE))
    absorbed, backend = absorbing(pages, expansion, PLAIN, scales), ReferenceAttention(case.shape)
    step = ExpandingAttention(backend, case.shape).prepare(case.batch, case.pages.null_page)
    assert isinstance(step, ExpandedStep)
    plain = backend.prepare(case.batch, case.pages.null_page)
    found, expected = step.values(pages, query, expansion, scales, absorbed), absorbed(plain, query)
    assert takes_cudnn and not any(takes_cudnn)
    torch.testing.assert_close(found, expected, atol=1e-6 if is_fp8 else 1e-10, rtol=0)
    torch.testing.assert_close(absorbed(step, query), expected)


def test_short_rows_and_recorded_steps_are_left_to_the_backend() -> None:
    case = Paged([(9, 1), (40, 7)], Heads(HEADS, 1, RANK + ROPE, RANK), 3, None, torch.float32)
    backend = ExpandingAttention(ReferenceAttention(case.shape), case.shape)
    assert not isinstance(backend.prepare(case.batch, case.pages.null_page), ExpandedStep)
    long = Paged([(9, 8)], Heads(HEADS, 1, RANK + ROPE, RANK), 3, None, torch.float32)
    bounded = replace(long.batch, is_bounded=True)
    assert not isinstance(backend.prepare(bounded, long.pages.null_page), ExpandedStep)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v3_direct"])
def test_a_model_generates_the_same_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks, of which the second is expanded after a prefix, among decodes."""
    calls: list[int] = []
    values = ExpandedStep.values

    def noting(step: ExpandedStep, *args: Any) -> torch.Tensor:
        calls.append(max(step.batch.query_lens))
        return values(step, *args)

    monkeypatch.setattr(ExpandedStep, "values", noting)
    model, found = save_tiny(family, tmp_path, num_hidden_layers=2), []
    for is_expanding in (False, True):
        runner = load_runner(model, page_size=3, kv_tokens=600, attention="reference")
        if is_expanding:
            assert isinstance(runner, ModelRunner)
            facts = runner.model_config
            shape = AttentionShape.of(facts.attention, facts.windows, runner.page_size)
            runner = with_attention(runner, ExpandingAttention(ReferenceAttention(shape), shape))
        first, second = (
            RequestByHand(random_prompt(length, seed=length), pages_of(3, 180 * at, 180))
            for at, length in enumerate((5, 70))
        )
        run_step(runner, [(first, None)])
        run_step(runner, [(first, None), (second, 50)])
        for _ in range(3):
            run_step(runner, [(first, None), (second, None)])
        found.append([first.request.tokens, second.request.tokens])
    assert found[0] == found[1]
    assert calls == [50, 50, 20, 20]
