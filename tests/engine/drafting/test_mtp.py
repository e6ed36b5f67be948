"""Drafts of a model's own layer for multi-token prediction, compared with the layer in plain torch."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache import Namespace
from engine import Speculation
from engine.base.errors import ModelLoadError
from engine.layers.linear import Fp8Linear
from engine.loading.check_model import check_model
from engine.loading.load_model import load_model
from engine.models.mtp import MTPDecoder
from engine.program.engine import Engine
from engine.program.load_with_layer import load_with_layer
from engine.runner.hidden_states import HiddenStates
from engine.runner.layer_drafter import LayerDrafter
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.checkpoints import LINEAR, configure, fp8_channels, fp8_config, rewrite
from tests.engine.support.engine_run import Run
from tests.engine.support.mtp_models import NAMES, reference_drafts, save_with_mtp
from tests.engine.support.oracle import Tiny, save_tiny
from tests.engine.support.recorded_graphs import record_as_on_gpus

ALWAYS = Speculation("mtp", max_drafts=3, adaptive=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The directory of a family's tiny model with an MTP layer."""
    return cache(lambda family: save_with_mtp(family, tmp_path_factory.mktemp(family) / "model"))


def config_for(directory: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(directory), "device": "cpu", "kv_pages": 60, "speculation": ALWAYS, **settings}
    )


def request(tokens: Sequence[int], name: str = "r") -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=100)
    made = Request.make(name, list(tokens), sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
    made.longest = 200
    return made


@pytest.mark.parametrize("family", NAMES)
def test_drafts_are_the_layer_s_predictions(model: Tiny, family: str) -> None:
    runner, drafter = load_with_layer(config_for(model(family)))
    one = request(range(30, 57))
    result = runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),)))
    one.tokens += result.token_ids
    assert drafter.propose([one], [4]) == [reference_drafts(family, model(family), one.tokens, 4)]


class Watched:
    """An engine whose drafts are recorded: each with the request's tokens and the beginning of its context."""

    def __init__(self, config: EngineConfig, every: int = 1) -> None:
        """Only one in `every` steps may have draft tokens."""
        self.run = Run(config)
        drafter = self.run.engine.scheduler.speculator.drafter
        assert isinstance(drafter, LayerDrafter)
        self.drafter = drafter
        self.drafts: list[tuple[list[int], int, list[int]]] = []
        propose, calls = drafter.propose, itertools.count()

        def recorded(requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
            if next(calls) % every:
                return [()] * len(requests)
            found = propose(requests, max_tokens)
            for one, draft in zip(requests, found, strict=True):
                follower = drafter._followers.get(one.request_id)
                self.drafts.append((list(one.tokens), 0 if follower is None else follower.first, list(draft)))
            return found

        drafter.propose = recorded  # type: ignore[method-assign]

    def check(self, family: str, directory: Path, every: int = 1) -> None:
        """All drafts, or one in `every`, are the layer's predictions."""
        for tokens, start, draft in self.drafts[::every]:
            expected = reference_drafts(family, directory, tokens, len(draft), max(start, 1), FEW["logit_bias"])
            assert draft == expected, (start, tokens)

    @property
    def starts(self) -> list[int]:
        """Where the contexts of the drafts began; 0 for none."""
        return [start if draft else 0 for _, start, draft in self.drafts]


FEW: dict[str, Any] = {"logit_bias": dict.fromkeys(range(20, 26), 12.0)}
"""Six tokens above the others, so that some draft tokens are accepted."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 18, **FEW}


def run_both(config: EngineConfig, prompts: Sequence[Sequence[int]], every: int = 1) -> Watched:
    """Run the prompts, which arrive one step after the other, with drafts and without: the tokens are the same."""
    watched, plain = Watched(config, every), Run(dataclasses.replace(config, speculation=None))
    for run in (watched.run, plain):
        for number, prompt in enumerate(prompts):
            run.submit(str(number), prompt, SamplingParams(**GREEDY))
            run.step()
        run.finish()
    assert {name: watched.run.tokens(name) for name in plain.events} == {
        name: plain.tokens(name) for name in plain.events
    }
    return watched


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_drafts_are_the_layer_s_predictions_whatever_came_before(model: Tiny, family: str, page_size: int) -> None:
    """Draft tokens were accepted or not, prompts came in chunks, began alike and were computed again."""
    prompts = [
        list(range(20, 26)) * 4,
        list(range(30, 71)),
        list(range(30, 60)),
        [20, 21, 22],
        list(range(30, 71)),
    ]
    settings = {"page_size": page_size, "kv_pages": 96 // page_size, "max_running": 4, "max_step_tokens": 24}
    watched = run_both(config_for(model(family), **settings), prompts)
    assert watched.run.engine.scheduler.load(0.0).num_preemptions > 0
    assert 0 < watched.run.num_accepted < watched.run.num_drafts
    assert watched.starts.count(1) > 0.5 * len(watched.starts)
    watched.check(family, model(family), every=3)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_drafts_are_the_same_where_steps_are_replayed(
    model: Tiny, family: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four steps have no draft tokens; graphs that sample replay some of these."""
    recordings = record_as_on_gpus(monkeypatch)
    settings = {"cuda_graphs": "lazy", "overlap": overlap, "max_running": 4}
    prompts = [20, 21, 22], list(range(30, 41)), [5, 6]
    watched = run_both(config_for(model(family), **settings), prompts, every=4)
    assert recordings[0].num_replayed > 3
    assert sum(len(draft) for *_, draft in watched.drafts) > 10
    assert set(watched.starts) <= {0, 1}
    watched.check(family, model(family))


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_layer_in_eight_bits_drafts(tmp_path: Path, is_stored: bool) -> None:
    """The files have its matrices in float8, as published ones do, or loading rounds them. Most of its drafts are
    those of the unrounded layer.
    """
    plain = save_with_mtp("glm4_moe", tmp_path / "model")
    directory = shutil.copytree(plain, tmp_path / "rounded")
    if is_stored:
        rewrite(directory, store_in_fp8)
        configure(directory, **fp8_config())
    prompts = [list(range(first, first + 9)) for first in (20, 30, 40, 50)]
    watched = run_both(config_for(directory, quantization=None if is_stored else "fp8"), prompts)
    layer = watched.drafter._layer.decoder
    assert isinstance(layer, MTPDecoder)
    assert isinstance(layer.get_submodule("layers.0.attention.o_proj"), Fp8Linear)
    assert type(layer.get_submodule("projection")) is torch.nn.Linear
    drafts = [(tokens, draft[:1]) for tokens, _, draft in watched.drafts if draft]
    expected = [reference_drafts("glm4_moe", plain, tokens, 1, bias=FEW["logit_bias"]) for tokens, _ in drafts]
    equal = sum(draft == other for (_, draft), other in zip(drafts, expected, strict=True))
    assert equal > 0.7 * len(drafts) > 20


def store_in_fp8(weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in list(weights.items()):
        if LINEAR.fullmatch(name):
            del weights[name]
            weights |= fp8_channels(name.removesuffix(".weight"), tensor)[0]


def test_requests_that_begin_alike_share_the_layer_s_kv(model: Tiny) -> None:
    watched = Watched(config_for(model("glm4_moe")))
    for name in ("first", "second"):
        watched.run.submit(name, list(range(30, 71)), SamplingParams(**GREEDY))
        watched.run.finish()
    computed = [tokens for tokens, _, _ in watched.drafts if len(tokens) == 42]
    assert len(computed) == 2 and watched.starts.count(1) == len(watched.starts)
    assert watched.drafter.cache.stats.inserted_tokens < 2 * 41
    watched.check("glm4_moe", model("glm4_moe"))


def test_a_context_begins_where_hidden_states_are_known(model: Tiny) -> None:
    """The first prompt is longer than what is kept. Of the second, the model has KV from its cache, and the layer
    has none.
    """
    few = dataclasses.replace(ALWAYS, max_prefill_tokens=8)
    watched = Watched(config_for(model("qwen3_next"), speculation=few))
    watched.run.submit("long", list(range(30, 71)), SamplingParams(**GREEDY))
    watched.run.finish()
    assert set(watched.starts) == {41 - 8 + 1}
    assert watched.drafter.cache.stats.inserted_tokens == 0
    watched.run.submit("again", list(range(30, 75)), SamplingParams(**GREEDY))
    watched.run.finish()
    assert watched.starts[-1] > 41 - 8 + 1
    watched.check("qwen3_next", model("qwen3_next"))


def test_a_request_that_was_not_drafted_for_continues_where_hidden_states_are_known(model: Tiny) -> None:
    runner, drafter = load_with_layer(
        config_for(model("glm4_moe"), speculation=Speculation("mtp", max_prefill_tokens=6))
    )
    one = request(range(30, 57))

    def step(start: int) -> None:
        ids = one.tokens[start:]
        result = runner.run(StepPlan((Chunk(one, start, len(ids), ids, [0, 1, 2], True),)))
        one.tokens += result.token_ids

    step(0)
    [first] = drafter.propose([one], [2])
    assert first == reference_drafts("glm4_moe", model("glm4_moe"), one.tokens, 2, start=27 - 6 + 1)
    for start in range(27, 36):  # more tokens than are kept
        step(start)
    [second] = drafter.propose([one], [2])
    assert second == reference_drafts("glm4_moe", model("glm4_moe"), one.tokens, 2, start=36 - 6 + 1)
    drafter.forget(one)
    account = drafter.cache.account()
    assert account.locked == account.private == 0


def test_without_hidden_states_nothing_is_drafted(model: Tiny) -> None:
    """As after KV came from elsewhere: once a step has computed a token, there are drafts."""
    runner, drafter = load_with_layer(config_for(model("glm4_moe")))
    one = request(range(30, 57))
    assert [list(draft) for draft in drafter.propose([one], [3])] == [[]]
    one.tokens += runner.run(StepPlan((Chunk(one, 0, 27, one.tokens, [0, 1, 2], True),))).token_ids
    [draft] = drafter.propose([one], [3])
    assert len(draft) == 3


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_the_layer_is_reported_as_unused_only_where_it_is(
    model: Tiny, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = config_for(model(family))
    load_with_layer(config)
    assert "not used of" in caplog.text and "tensors: " not in caplog.text
    load_model(dataclasses.replace(config, speculation=None))
    assert f"tensors: {NAMES[family][0].split('.')[0]}." in caplog.text


def test_a_layer_that_is_never_right_is_soon_not_asked(model: Tiny) -> None:
    adaptive = Speculation("mtp", max_drafts=3)
    run = Run(config_for(model("deepseek_v3"), speculation=adaptive))
    run.submit("long", [1, 2, 3], SamplingParams(temperature=0, max_tokens=300))
    run.finish()
    assert 0 < run.num_drafts < 300  # 3 in each of 300 steps, if it were always asked
    assert len(run.tokens("long")) == 300


# --- hidden states --------------------------------------------------------------------------------------------


def states(positions: range) -> torch.Tensor:
    return torch.tensor([[float(position)] for position in positions])


def kept(hidden: HiddenStates, one: Request, start: int, count: int) -> list[float]:
    return torch.cat(hidden.take(one, start, count)).flatten().tolist()


def chunk(one: Request, positions: range) -> Chunk:
    return Chunk(one, positions.start, len(positions), [0] * len(positions), [], True)


def test_hidden_states_of_wrong_draft_tokens_are_replaced() -> None:
    hidden, one, other = HiddenStates(8, torch.clone), request([1] * 20), request([2] * 20)
    hidden.add([chunk(one, range(4)), chunk(other, range(2))], torch.cat((states(range(4)), states(range(2)))))
    hidden.add([chunk(one, range(2, 5))], states(range(2, 5)) + 100)
    assert kept(hidden, one, 0, 5) == [0, 1, 102, 103, 104]
    assert kept(hidden, other, 0, 2) == [0, 1]


def test_only_the_last_hidden_states_are_kept_and_those_before_a_gap_are_dropped() -> None:
    hidden, one = HiddenStates(3, torch.clone), request([1] * 20)
    hidden.add([chunk(one, range(7))], states(range(7)))
    assert hidden.first(one) == 4
    hidden.add([chunk(one, range(7, 8))], states(range(7, 8)))
    assert kept(hidden, one, 5, 3) == [5, 6, 7]
    assert hidden.first(one) == 7
    hidden.add([chunk(one, range(9, 10))], states(range(9, 10)))
    assert hidden.first(one) == 9


def test_hidden_states_are_copied_and_end_with_their_request() -> None:
    hidden, one, rows = HiddenStates(8, torch.clone), request([1] * 20), states(range(3))
    hidden.add([chunk(one, range(3))], rows)
    rows.zero_()
    assert kept(hidden, one, 0, 3) == [0, 1, 2]
    assert len(hidden._kept) == 1
    del one
    gc.collect()
    assert len(hidden._kept) == 0


# --- what is refused ------------------------------------------------------------------------------------------


def changed(directory: Path, target: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Copy a model with another tensor of this name, or without it."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    del weights[name]
    save_file(
        {**weights, **({} if tensor is None else {name: tensor})}, target / "model.safetensors", {"format": "pt"}
    )
    return target


def test_weights_without_the_layer_are_refused(model: Tiny, tmp_path: Path) -> None:
    broken = changed(model("glm4_moe"), tmp_path / "broken", "model.layers.3.eh_proj.weight", None)
    with pytest.raises(ModelLoadError, match=r"lack model.*eh_proj\.weight: they were saved without the MTP"):
        Engine.from_config(config_for(broken))
    with pytest.raises(ModelLoadError, match=r"lack model\.layers\.3\.eh_proj\.weight"):
        check_model(config_for(broken))
    Engine.from_config(config_for(broken, speculation=None)).close()


@pytest.mark.parametrize("name", ["model.layers.3.eh_proj.weight", "model.layers.3.self_attn.o_proj.weight"])
def test_weights_of_another_shape_are_refused(model: Tiny, tmp_path: Path, name: str) -> None:
    broken = changed(model("glm4_moe"), tmp_path / "broken", name, torch.zeros(96, 5))
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \(96, 5\), config.json makes it"):
        Engine.from_config(config_for(broken))


def test_a_family_without_the_layer_is_refused(tmp_path: Path) -> None:
    llama = save_tiny("llama2", tmp_path / "llama")
    with pytest.raises(ValueError, match="knows no MTP layer of LlamaForCausalLM; DeepSeek-V3"):
        Engine.from_config(config_for(llama))


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_are_refused(model: Tiny, name: str) -> None:
    with pytest.raises(ValueError, match="runs only on one device: set tensor_parallel_size"):
        Engine.from_config(config_for(model("glm4_moe"), **{name: 2}))
