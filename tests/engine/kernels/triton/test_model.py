"""Whole tiny models generate the same tokens with the Triton attention kernels as with `reference`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
from engine.attention.triton_step import TritonStep
from engine.models import delta_net
from engine.models.triton_delta_net import TritonDeltaHeads
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.sampling_params import SamplingParams
from tests.engine.support.engine_run import Run
from tests.engine.support.oracle import save_tiny
from tests.engine.support.recorded_graphs import record_as_on_gpus
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


@pytest.mark.parametrize("family", ["qwen2_sliding", "mqa", "qwen3", "deepseek_v3"])
def test_a_model_generates_the_same_tokens_as_on_reference(family: str, tmp_path: Path) -> None:
    """Some models have windows in some layers, a single KV head, heads of 32 or 64 numbers, or latent KV."""
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


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_recurrent_model_computes_prompts_and_drafts_by_pieces(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, after a prefix that another prompt begins with too, and after draft tokens, right and wrong."""
    model = str(save_tiny("qwen3_next", tmp_path))
    config = EngineConfig(model, device="cpu", kv_pages=64, max_running=3, max_step_tokens=40)
    text = [20, 21, 22, 23, 24, 25] * 8
    few = dict.fromkeys(range(20, 26), 12.0)  # so that prompt lookup has something to find
    prompts, params = [text, [*text[:41], 31], text[3:20]], SamplingParams(seed=1, max_tokens=16, logit_bias=few)

    def run(config: EngineConfig) -> Run:
        run = Run(config)
        run.submit("0", prompts[0], params)
        run.finish()
        for name in ("1", "2"):
            run.submit(name, prompts[int(name)], params)
        run.finish()
        return run

    expected = run(config)
    monkeypatch.setattr(delta_net, "kind_of_heads", lambda shape, conv: TritonDeltaHeads)
    drafting = Speculation(method="ngram", max_drafts=3, adaptive=False)
    if is_recorded:
        made = record_as_on_gpus(monkeypatch)
        config = replace(config, cuda_graphs="lazy")
    found = run(replace(config, speculation=drafting))
    for name in ("0", "1", "2"):
        assert found.tokens(name) == expected.tokens(name)
    assert found.engine.cache.stats.hit_tokens > 0
    assert 0 < found.num_accepted < found.num_drafts
    if is_recorded:
        drafts = [step for step in found.steps if step.num_draft_tokens]
        assert sum(recording.num_replayed for recording in made) > 0
        assert sum(step.is_replayed for step in drafts) > len(drafts) / 2
        assert sum(recording.num_cuts for recording in made) > 0, "prompts, with states between pieces"
