"""Speculation with real models: the same tokens as without, the model's own distribution, and the counters."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, Speculation
from engine.base.errors import ModelLoadError
from engine.grammar.spec import Grammar
from engine.program.engine import Engine
from engine.runner.draft_model import DraftModel
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from tests.engine.support.eagle3_models import save_eagle3
from tests.engine.support.engine_run import Run
from tests.engine.support.mtp_models import save_with_mtp
from tests.engine.support.oracle import VOCAB, oracle_logits, save_tiny

NGRAM = Speculation("ngram", adaptive=False)
EOS = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, a smaller one with its vocabulary, and one with another vocabulary."""
    directory = tmp_path_factory.mktemp("models")
    return {
        "model": save_tiny("llama3.1", directory / "model", eos_token_id=EOS),
        "smaller": save_tiny("qwen3", directory / "smaller", seed=3, num_hidden_layers=1),
        "stranger": save_tiny("llama2", directory / "stranger", vocab_size=VOCAB + 3, num_hidden_layers=1),
        "mtp": save_with_mtp("glm4_moe", directory / "mtp", eos_token_id=EOS),
        "eagle3": save_eagle3(directory / "eagle3", directory / "model"),
    }


@pytest.fixture(scope="module", params=["ngram", "itself", "smaller", "mtp", "eagle3"])
def speculation(request: pytest.FixtureRequest, models: dict[str, Path]) -> Speculation:
    if request.param in ("ngram", "mtp"):
        return Speculation(request.param, adaptive=False)
    if request.param == "eagle3":
        return Speculation("eagle3", model=str(models["eagle3"]), adaptive=False)
    model = models["model" if request.param == "itself" else "smaller"]
    return Speculation("draft_model", model=str(model), adaptive=False)


@pytest.fixture(scope="module")
def drafted(speculation: Speculation, models: dict[str, Path]) -> str:
    """The directory of the model for which tokens are drafted."""
    return str(models["mtp" if speculation.method == "mtp" else "model"])


# --- the same tokens ------------------------------------------------------------------------------------------

DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 11}
# Six tokens above the others: text that repeats, so that prompt lookup has something to find.
FEW: dict[str, Any] = {"logit_bias": dict.fromkeys(range(20, 26), 12.0)}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {**DRAWN, **FEW},
    "top_p, top_k, min_p": {**DRAWN, **FEW, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "presence": {"temperature": 0, "presence_penalty": 1.5, **FEW},
    "frequency": {**DRAWN, "frequency_penalty": 0.4, **FEW},
    "repetition": {"temperature": 0, "repetition_penalty": 1.4},
    "logprobs": {**DRAWN, **FEW, "logprobs": 3},
    "end of text": {**DRAWN, "logit_bias": {EOS: 5.0, 20: 9.0, 21: 9.0}},
    "end of text forbidden at first": {**DRAWN, "min_tokens": 11, "logit_bias": {EOS: 8.0, 20: 9.0, 21: 9.0}},
    "stop token": {**DRAWN, **FEW, "stop_token_ids": (24,)},
}
PROMPTS = [[20, 21, 22, 23, 24, 25] * 4, list(range(30, 71)), [20, 21, 22], [20, 21, 22, 23, 24, 25] * 4 + [31]]


def run_all(config: EngineConfig) -> Run:
    """Run all choices in mixed batches: prompts in chunks beside decodes, with too little memory for all."""
    run = Run(config)
    for (name, choice), (index, prompt) in itertools.product(CHOICES.items(), enumerate(PROMPTS)):
        run.submit(f"{name} {index}", prompt, SamplingParams(**{"max_tokens": 25, **choice}))
        run.step()
    run.finish()
    return run


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_speculation_changes_no_token(drafted: str, speculation: Speculation, page_size: int) -> None:
    config = EngineConfig(
        model=drafted,
        device="cpu",
        page_size=page_size,
        kv_pages=128 // page_size,
        max_running=8,
        max_step_tokens=40,
        speculation=speculation,
    )
    plain, run = run_all(dataclasses.replace(config, speculation=None)), run_all(config)
    for name, events in plain.events.items():
        assert run.tokens(name) == plain.tokens(name), name
        assert run.events[name][-1].finish_reason == events[-1].finish_reason, name
        logprobs = [[p for event in some for p in event.logprobs or ()] for some in (events, run.events[name])]
        for without, with_drafts in zip(*logprobs, strict=True):
            assert with_drafts.token_id == without.token_id
            assert with_drafts.logprob == pytest.approx(without.logprob, abs=1e-4)
            assert dict(with_drafts.top) == pytest.approx(dict(without.top), abs=1e-4)
    assert run.num_accepted > 0
    assert run.num_accepted < run.num_drafts or speculation.model == config.model, "only itself is always right"
    assert len(run.steps) < len(plain.steps)
    assert run.engine.scheduler.load(0.0).num_preemptions > 0


def test_a_request_resumes_at_any_token(drafted: str, speculation: Speculation) -> None:
    """A request cut anywhere, even inside accepted tokens, resumes the same with or without speculation."""
    config = EngineConfig(model=drafted, device="cpu", kv_pages=200, speculation=speculation)
    sampling = SamplingParams(max_tokens=14, **DRAWN, **FEW)
    plain = Run(dataclasses.replace(config, speculation=None))
    plain.submit("whole", PROMPTS[0], sampling)
    plain.finish()
    whole = plain.tokens("whole")
    run = Run(config)
    for cut in range(len(whole) + 1):
        run.submit(str(cut), PROMPTS[0], sampling, output_ids=whole[:cut])
    run.finish()
    assert [run.tokens(str(cut)) for cut in range(len(whole) + 1)] == [
        whole[cut:] for cut in range(len(whole) + 1)
    ]


def test_a_prompt_that_the_drafter_computes_in_parts_gets_drafts(drafted: str, speculation: Speculation) -> None:
    """The first parts end in no draft token. They are smaller than a step's draft tokens, which may be wrong."""
    settings = dataclasses.replace(speculation, max_prefill_tokens=3)
    run = Run(EngineConfig(model=drafted, device="cpu", kv_pages=200, max_step_tokens=256, speculation=settings))
    run.submit("a", PROMPTS[0], SamplingParams(max_tokens=25, **DRAWN, **FEW))
    run.finish()
    assert run.engine.scheduler.speculator.drafter is not None and run.num_drafts > 0


# --- the model's own distribution -----------------------------------------------------------------------------


def test_tokens_drawn_after_accepted_draft_tokens_have_the_model_s_probabilities(tmp_path: Path) -> None:
    """For many seeds, the next token is compared with the model's own probabilities (chi-square)."""
    tiny: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 5, "initializer_range": 0.2}
    model = save_tiny("llama2", tmp_path / "model", **tiny)
    smaller = save_tiny("llama2", tmp_path / "smaller", seed=8, **tiny)
    settings = Speculation("draft_model", model=str(smaller), max_drafts=1, adaptive=False)
    run = Run(EngineConfig(model=str(model), device="cpu", kv_pages=1000, max_waiting=5000, speculation=settings))
    prompt, num_seeds = [1, 2, 3, 4, 0, 2, 1], 4000
    for seed in range(num_seeds):
        run.submit(str(seed), prompt, SamplingParams(max_tokens=3, temperature=3.0, seed=seed))
    run.finish()
    assert run.num_drafts == num_seeds
    assert 0.2 * num_seeds < run.num_accepted < 0.9 * num_seeds

    # The first token comes alone; the draft token and the one after it in one event, if the draft is accepted.
    drawn: Counter[tuple[int, ...]] = Counter()
    for events in run.events.values():
        if len(events[1].token_ids) == 2:
            drawn[(*events[0].token_ids, *events[1].token_ids)] += 1
    chi_square, freedom = 0.0, 0
    for before in itertools.product(range(5), repeat=2):
        num_drawn = sum(drawn[(*before, token)] for token in range(5))
        logits = oracle_logits(model, [*prompt, *before])[-1].double()
        wanted = torch.softmax(logits / 3.0, -1) * num_drawn
        likely = wanted >= 5
        if likely.sum() < 2:
            continue
        counts = torch.tensor([drawn[(*before, token)] for token in range(5)])[likely]
        chi_square += float(((counts - wanted[likely]) ** 2 / wanted[likely]).sum())
        freedom += int(likely.sum()) - 1
    assert freedom >= 50
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


# --- how much is accepted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_right(models: dict[str, Path], temperature: float) -> None:
    settings = Speculation("draft_model", model=str(models["model"]), adaptive=False)
    run = Run(EngineConfig(model=str(models["model"]), device="cpu", kv_pages=200, speculation=settings))
    for seed, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True)
        run.submit(str(seed), prompt, sampling)
    run.finish()
    assert run.num_accepted > 0.98 * run.num_drafts
    assert len(run.steps) < 2 * 60 / 5 + 4


def test_memory_is_shared_out_for_the_kv_of_both_models(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.load_model.available_ram", lambda: 2**20)
    settings = Speculation("draft_model", model=str(models["smaller"]))
    config = EngineConfig(model=str(models["model"]), device="cpu", kv_memory_share=0.5, speculation=settings)
    engine = Engine.from_config(config)
    drafter = engine.scheduler.speculator.drafter
    assert isinstance(drafter, DraftModel)
    bytes_of_a_token = 4 * 2 * 2 * (3 * 32 + 1 * 64)  # float32, keys and values, 2 heads of each layer
    assert engine.cache.num_pages == drafter.cache.num_pages == 2**19 // (16 * bytes_of_a_token)


def test_without_pages_of_its_own_the_draft_model_delays_no_request(models: dict[str, Path]) -> None:
    settings = Speculation("draft_model", model=str(models["model"]), kv_pages=1, adaptive=False)
    config = EngineConfig(model=str(models["model"]), device="cpu", kv_pages=200, speculation=settings)
    run, plain = Run(config), Run(dataclasses.replace(config, speculation=None))
    for one in (run, plain):
        one.submit("a", PROMPTS[1], SamplingParams(temperature=0, max_tokens=20))
        one.finish()
    assert run.tokens("a") == plain.tokens("a")
    assert run.num_drafts == 0


# --- the embedded model, and what is refused ------------------------------------------------------------------

QUESTION = {"role": "user", "content": "What does itertools.chain do?"}


def test_an_answer_that_repeats_comes_several_tokens_a_step() -> None:
    plain, llm = (LLM("demo", kv_pages=600, speculation=settings) for settings in (None, NGRAM))
    [first] = plain.chat([QUESTION])
    conversation = [QUESTION, {"role": "assistant", "content": first.text}, QUESTION]
    steps: list[StepStats] = []
    llm.engine.loop.on_step = steps.append
    [again], [expected] = llm.chat(conversation), plain.chat(conversation)
    assert again.token_ids == expected.token_ids
    assert len(again.token_ids) > 1.8 * len(steps)


DRAFTERS = {"ngram": NGRAM, "itself": Speculation("draft_model", model="demo", adaptive=False)}
PEOPLE = """{"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": false}}"""


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_structured_answers_are_the_same_with_drafts(drafter: str) -> None:
    """The output is JSON that repeats its keys. Cut at any token, the rest is the same too."""
    config = EngineConfig(kv_pages=600, threads=1)
    people = Grammar("json_schema", PEOPLE)
    sampling = SamplingParams(temperature=1.3, seed=4, max_tokens=300, grammar=people)
    plain, run = Run(config), Run(dataclasses.replace(config, speculation=DRAFTERS[drafter]))
    plain.submit("whole", [5, 6, 7], sampling)
    plain.finish()
    whole = plain.tokens("whole")
    cuts = range(0, len(whole), len(whole) // 3)
    for cut in cuts:
        run.submit(str(cut), [5, 6, 7], sampling, output_ids=whole[:cut])
    run.finish()
    assert [run.tokens(str(cut)) for cut in cuts] == [whole[cut:] for cut in cuts]
    assert run.events["0"][-1].finish_reason == plain.events["whole"][-1].finish_reason == "stop"
    # How often prompt lookup is right depends on the text, and that on how a machine rounds.
    assert run.num_accepted > (0.5 * run.num_drafts if drafter == "itself" else 0)
    assert run.num_drafts > 0


def test_a_stop_string_inside_an_accepted_run_cuts_its_tokens_too() -> None:
    plain, llm = (LLM("demo", kv_pages=600, threads=1, speculation=each) for each in (None, DRAFTERS["itself"]))
    [whole] = plain.chat([QUESTION])
    for stop in (whole.text[20:23], whole.text[31:35], whole.text[40:43]):
        params = SamplingParams(temperature=0, max_tokens=64, stop=(stop,), logprobs=0)
        [expected], [found] = plain.chat([QUESTION], params), llm.chat([QUESTION], params)
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert [at.token_id for at in found.logprobs] == found.token_ids


def test_a_draft_model_of_another_vocabulary_is_refused(models: dict[str, Path]) -> None:
    settings = Speculation("draft_model", model=str(models["stranger"]))
    config = EngineConfig(model=str(models["model"]), device="cpu", kv_pages=10, speculation=settings)
    with pytest.raises(ModelLoadError, match=r"/stranger has .* than .*/model: it has 104 tokens, not 101"):
        Engine.from_config(config)


def test_a_draft_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"no directory \./nowhere"):
        LLM("demo", kv_pages=10, speculation=Speculation("draft_model", model="./nowhere"))


def test_speculation_is_a_speculation() -> None:
    with pytest.raises(ValueError, match="speculation must be a Speculation or None, got 'ngram'"):
        LLM("demo", speculation="ngram")
