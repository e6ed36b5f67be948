"""Whole tiny models generate the same tokens with the Triton attention kernels as with `reference`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
from engine.attention.triton_step import TritonStep
from tests.engine.support.oracle import save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner, pages_of, random_prompt, run_step


def tokens(model: Path, attention: str, **settings: object) -> list[list[int]]:
    """Return the tokens of three requests: a long prompt in two chunks, one that decodes, and a later one."""
    runner = load_runner(model, page_size=3, kv_tokens=600, attention=attention, **settings)
    assert runner.attention_name == attention
    first, second, third = (
        RequestByHand(random_prompt(length, seed=length), pages_of(3, 180 * index, 180))
        for index, length in enumerate((9, 70, 5))
    )
    run_step(runner, [(first, None)])
    run_step(runner, [(first, None), (second, 50)])
    run_step(runner, [(first, None), (second, None), (third, None)])
    for _ in range(2):
        run_step(runner, [(first, None), (second, None), (third, None)])
    return [row.request.tokens for row in (first, second, third)]


@pytest.mark.parametrize("family", ["qwen2_sliding", "mqa", "qwen3"])
def test_a_model_generates_the_same_tokens_as_on_reference(family: str, tmp_path: Path) -> None:
    """Some models have windows in some layers, a single KV head, or heads of 32 or 64 numbers."""
    model = save_tiny(family, tmp_path, num_hidden_layers=2)
    assert tokens(model, "triton") == tokens(model, "reference")


def test_a_model_with_kv_in_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales reach the kernels; without them the tokens would differ."""
    model = save_tiny("qwen2_sliding", tmp_path, num_hidden_layers=2)
    on_triton = tokens(model, "triton", kv_dtype="fp8")
    assert on_triton == tokens(model, "reference", kv_dtype="fp8")
    attend = TritonStep.attend
    monkeypatch.setattr(
        TritonStep, "attend", lambda step, pages, query, window, *_: attend(step, pages, query, window)
    )
    assert on_triton != tokens(model, "triton", kv_dtype="fp8")
