"""Every family against transformers: logits, and greedy tokens in whole engines, whatever happens to a request."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.models.native_decoder import unsupported
from engine.parallel.division import most_stages
from engine.settings.drafting import Speculation
from engine.values.plan import StepPlan
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.engines_on_ranks import Layout, run_on_ranks, tokens_of_each
from tests.engine.support.oracle import (
    MORE_FAMILIES,
    oracle_greedy,
    oracle_logits,
    oracle_model,
    random_ids,
    save_tiny,
)
from tests.engine.support.steps_by_hand import RequestByHand, load_runner
from tests.engine.support.whole_engines import engine_for, run_prompts, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=10)
BASE = random_ids(6, 50)
PROMPTS = [
    BASE[:26],
    [*BASE[:21], *random_ids(7, 8)],
    random_ids(1, 7) * 4,
    *(random_ids(i, 24 + i) for i in (2, 3, 4)),
]


@pytest.fixture(scope="module", params=MORE_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_and_parameters_are_those_of_transformers(model: Path) -> None:
    """A prompt is computed in two chunks, then token by token: logits at every border are within 1e-4 of those in
    float64, from which transformers' own in float32 may be as far.
    """
    expected = oracle_logits(model, BASE, torch.float64)
    runner = load_runner(model)
    for start, end in pairwise([0, 20, 40, *range(41, 51)]):
        row = RequestByHand(BASE[:end], range(5, 12), computed=start)
        got = runner.logits(StepPlan((row.chunk(),)))
        assert (got[0] - expected[end - 1]).abs().max() < 1e-4, f"after token {end}"
    assert runner.model_config.num_parameters == sum(p.numel() for p in oracle_model(model).parameters())


def test_in_bfloat16_logits_are_as_near_as_those_of_transformers(model: Path) -> None:
    """Both are compared with those in float64, by the length of the difference: ours is at most twice
    theirs, and a tenth of the logits'.
    """
    exact, theirs = (oracle_logits(model, BASE, dtype)[-1] for dtype in (torch.float64, torch.bfloat16))
    row = RequestByHand(BASE, range(4))
    ours = load_runner(model, dtype="bfloat16").logits(StepPlan((row.chunk(),)))[0].float()
    assert (ours - exact).norm() < min(2 * float((theirs - exact).norm()), 0.1 * float(exact.norm()))


def test_the_native_decoder_names_all_that_it_lacks(model: Path) -> None:
    """The native decoder computes all families but five, if heads fill vectors; all that it lacks is named."""
    config = ModelConfig.from_directory(model)
    is_recurrent, is_gemma4 = config.delta_net is not None, config.architecture == "Gemma4ForCausalLM"
    is_llama4 = config.architecture == "Llama4ForCausalLM"
    missing = {
        "gated delta nets": is_recurrent,
        "latent KV (MLA)": config.attention.latent is not None,
        "layers with different heads": is_gemma4,
        "keys and values of other layers": model.name.startswith("gemma4_small"),
        "norms of heads without weights": is_gemma4 or (is_llama4 and config.attention.qk_norm != "none"),
        "gates of attention": is_recurrent,
        "attention within chunks": is_llama4,
        "queries scaled by position": config.architecture == "Ministral3ForCausalLM" or is_llama4,
        "scaled layers": is_gemma4,
        "embeddings for single layers": is_gemma4 and config.inputs is not None,
        "experts next to an MLP": is_gemma4 and config.experts is not None,
        "scaled inputs of experts": is_llama4 and config.experts is not None,
        "gates of shared experts": is_recurrent and config.experts is not None,
    }
    named = ", ".join(name for name, holds in missing.items() if holds)
    odd = f"head_dim {config.head_dim}: not a multiple of 32" if config.head_dim % 32 else None
    assert unsupported(config) == (f"the native decoder does not compute {named}" if named else odd)


def test_greedy_tokens_cold_warm_and_preempted(model: Path) -> None:
    """Memory holds about two of six requests, two of which share a beginning; all come twice, and the last again.
    Where layers have a window, pages of one token hold more in as much memory, without any preemption.
    """
    has_groups = isinstance(LayerGroups.of(ModelConfig.from_directory(model)), LayerGroups)
    expected = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    for page_size in (1, 16) if has_groups else (16,):
        engine = engine_for(model, page_size, 112, max_step_tokens=24, max_running=6)
        assert (engine.runner.layer_groups is not None) == has_groups
        for first in (0, 0, len(PROMPTS) - 1):
            events = run_prompts(engine, PROMPTS[first:], GREEDY)
            assert [tokens_of(each) for each in events] == expected[first:]
        load = engine.loop.load()
        assert load.num_preemptions > 0 or page_size == 1
        assert load.cache.hit_tokens + load.cache.recompute_hit_tokens > 0


def test_greedy_tokens_of_requests_that_resume_elsewhere(model: Path) -> None:
    """Each goes on, after as many tokens as its number, in an engine that has never seen it, in pages of 64.
    Where a model attends within chunks, pages are no longer.
    """
    page_size = ModelConfig.from_directory(model).chunk or 64
    expected = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    engine = engine_for(model, page_size, 640, max_step_tokens=40, max_running=6)
    events: dict[str, list[StreamDelta]] = {}
    for number, prompt in enumerate(PROMPTS):
        given = expected[number][:number]
        engine.loop.submit(engine.new_request(str(number), prompt, GREEDY, output_ids=given))
    while engine.loop.has_work:
        for event in engine.loop.step():
            events.setdefault(event.request_id, []).append(event)
    for number, tokens in enumerate(expected):
        assert tokens_of(events[str(number)]) == tokens[number:]


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, stages=2)], ids=str)
def test_greedy_tokens_on_two_ranks_with_draft_tokens(model: Path, layout: Layout) -> None:
    speculation = Speculation(method="ngram", adaptive=False)
    if layout.stages > (most := most_stages(ModelConfig.from_directory(model))):
        with pytest.raises(ValueError, match=f"divided into at most {most} stage"):
            run_on_ranks(model, layout, PROMPTS)
        return
    shared, _ = run_on_ranks(model, layout, PROMPTS, GREEDY, speculation=speculation)
    assert tokens_of_each(shared) == [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4", "Mistral3", "Llama4"])
def test_only_the_text_model_of_a_multimodal_model_is_loaded(kind: str, tmp_path: Path) -> None:
    families = {"Gemma3": "gemma3", "Gemma4": "gemma4_small", "Mistral3": "mistral", "Llama4": "llama4"}
    text = save_tiny(families[kind], tmp_path / "text")
    config_of, class_of = (
        getattr(transformers, f"{kind}{part}") for part in ("Config", "ForConditionalGeneration")
    )
    described = json.loads((text / "config.json").read_text())
    is_tied = described["tie_word_embeddings"]
    whole = class_of(config_of(text_config=described, vision_config=VISION, tie_word_embeddings=is_tied)).eval()
    if kind == "Llama4":
        whole.language_model.load_state_dict(oracle_model(text).state_dict())
    else:
        whole.model.language_model.load_state_dict(oracle_model(text).model.state_dict())
        whole.lm_head.load_state_dict(oracle_model(text).lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    row = RequestByHand(BASE, range(4))
    got = load_runner(tmp_path / "whole").logits(StepPlan((row.chunk(),)))
    assert (got[0] - oracle_logits(text, BASE)[-1]).abs().max() < 1e-4
