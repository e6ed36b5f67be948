"""Mixtures of experts on several ranks: a part of each expert on every rank, or whole experts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.check_model import check_model
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path
from engine.models.expert_copies import NOTHING, Changes, ExpertCopies
from engine.models.experts import Experts
from engine.parallel.collective import Collective
from engine.parallel.shard import Shard, check_copies, check_divides
from engine.program.engine import Engine
from engine.ranks.messages import CopyExperts, StepTask
from engine.ranks.runner import ParallelRunner
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.plan import StepPlan
from engine.values.sampling_params import SamplingParams
from tests.engine.support.checkpoints import AWQ, FP8_BLOCKS, awq, fp8_blocks, make
from tests.engine.support.engines_on_ranks import PROMPTS, ranks_config, run_on_ranks, tokens_of_each
from tests.engine.support.oracle import Tiny, save_tiny, tiny_models
from tests.engine.support.rank_processes import Threads

SHAPE = {"num_attention_heads": 8, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    count = {"mixtral": {"num_local_experts": 4}}
    return tiny_models(tmp_path_factory, lambda family: SHAPE | count.get(family, {"num_experts": 8}))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe_plain", "qwen3_moe_mixed"])
def test_whole_experts_on_each_rank_give_the_same_tokens(tiny: Tiny, family: str, size: int) -> None:
    alone, _ = run_on_ranks(tiny(family), 1, PROMPTS)
    shared, _ = run_on_ranks(tiny(family), size, PROMPTS, expert_parallel=True)
    assert tokens_of_each(shared) == tokens_of_each(alone)


def layers_of(model: Path, size: int, splits_experts: bool) -> list[Experts]:
    """The experts of layer 1 on each rank, of `size`."""
    config = ModelConfig.from_directory(model)
    shards = [Shard(rank, size, splits_experts) for rank in range(size)]
    found = [
        load_decoder(model, config, torch.float32, torch.device("cpu"), ranks=Collective(shard)).layers[1].mlp
        for shard in shards
    ]
    assert all(isinstance(mlp, Experts) for mlp in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe_mixed"])
def test_a_rank_has_its_experts_or_its_columns_of_all(tiny: Tiny, family: str) -> None:
    (whole,) = layers_of(tiny(family), 1, False)
    stacked, sliced = layers_of(tiny(family), 4, True), layers_of(tiny(family), 4, False)
    assert torch.equal(torch.cat([part.gate_up_proj for part in stacked]), whole.gate_up_proj)
    assert torch.equal(torch.cat([part.down_proj for part in stacked]), whole.down_proj)
    assert torch.equal(torch.cat([part.down_proj for part in sliced], 2), whole.down_proj)
    gates, ups = zip(*(part.gate_up_proj.chunk(2, 1) for part in sliced), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], 1), whole.gate_up_proj)
    assert all(torch.equal(part.router, whole.router) for part in (*stacked, *sliced))


def test_experts_that_cannot_be_shared_are_refused(tiny: Tiny) -> None:
    config = ModelConfig.from_directory(tiny("mixtral"))
    assert config.experts is not None
    six = replace(config, experts=replace(config.experts, num_experts=6))
    with pytest.raises(
        ValueError, match=r"size is 4.* 8 query heads, 2 key-value heads and 6 experts evenly.* it can be 1, 2$"
    ):
        check_divides(six, 4, splits_experts=True)
    check_divides(six, 4)  # 96 inner columns of each: 24 on each rank
    odd = replace(config, experts=replace(config.experts, intermediate_size=90))
    with pytest.raises(ValueError, match=r"90 inner columns of an expert"):
        check_divides(odd, 4)


def test_inner_columns_count_only_where_a_layer_is_dense(tiny: Tiny) -> None:
    config = ModelConfig.from_directory(tiny("qwen3_moe_mixed"))
    mixed = replace(config, mlp=replace(config.mlp, intermediate_size=90))
    assert mixed.experts is not None
    with pytest.raises(ValueError, match="90 inner columns and 8 experts"):
        check_divides(mixed, 4, splits_experts=True)
    sparse = replace(mixed, experts=replace(mixed.experts, layers=frozenset({0, 1})))
    check_divides(sparse, 4, splits_experts=True)


def test_a_model_without_experts_has_none_to_share(tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path, **SHAPE)
    config = EngineConfig(model=str(model), device="cpu", tensor_parallel_size=2, expert_parallel=True)
    with pytest.raises(ValueError, match="expert_parallel is on, but Qwen3ForCausalLM has no experts"):
        Engine.from_config(config, launcher=Threads())


def copies_of_rank_0(engine: Engine) -> tuple[list[Experts], ExpertCopies]:
    """The experts in an engine's first rank, and its copies."""
    runner = getattr(engine.runner, "first")  # noqa: B009
    assert runner.expert_copies is not None
    return [layer.mlp for layer in runner.decoder.layers if isinstance(layer.mlp, Experts)], runner.expert_copies


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe_plain", "qwen3_moe_mixed", "gpt_oss"])
def test_copies_of_experts_in_demand_give_the_same_tokens(tiny: Tiny, family: str, size: int) -> None:
    """Copies change every few steps, and each is the weights of its expert."""
    params = SamplingParams(temperature=0, max_tokens=8)
    alone, _ = run_on_ranks(tiny(family), 1, PROMPTS, params)
    settings: dict[str, Any] = {"expert_parallel": True, "expert_copies": 2, "expert_copies_interval": 3}
    shared, engine = run_on_ranks(tiny(family), size, PROMPTS, params, **settings)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    layers, copies = copies_of_rank_0(engine)
    whole = load_decoder(
        tiny(family), ModelConfig.from_directory(tiny(family)), torch.float32, torch.device("cpu")
    )
    originals = [layer.mlp for layer in whole.layers if isinstance(layer.mlp, Experts)]
    assert any(expert != NOTHING for placement in copies.placed for experts in placement for expert in experts)
    for layer, original, placement in zip(layers, originals, copies.placed, strict=True):
        own = original.num_experts // size
        for slot, expert in enumerate(placement[0], own):
            if expert != NOTHING:
                for mine, theirs in zip(layer.stacked_weights, original.stacked_weights, strict=True):
                    assert torch.equal(mine[slot], theirs[expert])


@pytest.mark.parametrize("kind", ["fp8", "awq"])
def test_copies_of_quantized_experts_give_the_same_tokens(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {**SHAPE, "num_local_experts": 4}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "fp8": (fp8_blocks, FP8_BLOCKS),
        "awq": (awq, {**AWQ, "modules_to_not_convert": ["gate"]}),
    }
    model = make(tmp_path, *kinds[kind], "mixtral", **shape).quantized
    settings: dict[str, Any] = {"expert_parallel": True, "expert_copies_interval": 3}
    plain, _ = run_on_ranks(model, 2, PROMPTS, **settings)
    copied, place = set[int](), ExpertCopies.place

    def watched(copies: ExpertCopies, changes: Changes) -> None:
        copied.update(expert for placement in changes.values() for experts in placement for expert in experts)
        place(copies, changes)

    monkeypatch.setattr(ExpertCopies, "place", watched)
    shared, _ = run_on_ranks(model, 2, PROMPTS, expert_copies=1, **settings)
    assert tokens_of_each(shared) == tokens_of_each(plain)
    assert copied - {NOTHING}


def test_copies_need_whole_experts_of_one_stage() -> None:
    for settings in ({}, {"expert_parallel": True, "tensor_parallel_size": 1}):
        with pytest.raises(ValueError, match="expert_copies is 1, but copies are for GPUs"):
            EngineConfig(**{"tensor_parallel_size": 2, "expert_copies": 1, **settings})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert_copies is 1, but pipeline_parallel_size is 2"):
        EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2, expert_parallel=True, expert_copies=1)


def test_ranks_have_no_more_copies_than_others_have_experts(tiny: Tiny) -> None:
    config = ranks_config(tiny("mixtral"), 4, expert_parallel=True, expert_copies=4)
    for refused in (check_model, partial(Engine.from_config, launcher=Threads())):
        with pytest.raises(ValueError, match=r"expert_copies is 4, but each of 4 GPUs holds 1 of the 4 .*have 3"):
            refused(config)
    check_copies(ModelConfig.from_directory(tiny("mixtral")), replace(config, expert_copies=3))


def test_experts_next_to_an_mlp_have_no_copies(tmp_path: Path) -> None:
    config = ranks_config(save_tiny("gemma4_moe", tmp_path), 2, expert_parallel=True, expert_copies=1)
    with pytest.raises(ValueError, match="expert_copies is not supported for experts next to an MLP"):
        check_model(config)


def test_a_step_that_cannot_be_read_changes_no_copies(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 fails before the step, so it must not have told others to wait for weights."""
    config = ranks_config(tiny("mixtral"), 2, expert_parallel=True, expert_copies=1, expert_copies_interval=1)
    engine = Engine.from_config(config, launcher=Threads())
    runner, sent = engine.runner, list[object]()
    assert isinstance(runner, ParallelRunner)
    chooser, own = getattr(runner, "_copies"), runner.first  # noqa: B009
    try:
        chosen = {0: [[2], [NOTHING]]}
        monkeypatch.setattr(chooser, "next_changes", lambda: chosen)
        monkeypatch.setattr(runner.rank_group, "send", sent.append)
        with monkeypatch.context() as broken:
            broken.setattr(own, "read", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                runner.prepare(StepPlan())
        assert not sent
        runner.prepare(StepPlan())
        assert [type(task) for task in sent] == [CopyExperts, StepTask]
    finally:
        engine.close()


def test_a_draft_model_is_not_shared(tmp_path: Path) -> None:
    """The first rank has it whole, so it needs no experts, nor heads that ranks can share."""
    model = save_tiny("mixtral", tmp_path / "model", **SHAPE, num_local_experts=4)
    draft = save_tiny("qwen3", tmp_path / "draft", num_attention_heads=3, num_key_value_heads=1)
    for directory, path in product((model, draft), demo_model_path().glob("token*")):
        shutil.copy(path, directory)
    speculation = Speculation(method="draft_model", model=str(draft))
    settings: dict[str, Any] = {"expert_parallel": True, "expert_copies": 1, "speculation": speculation}
    check_model(ranks_config(model, 2, **settings))
    staged = EngineConfig(pipeline_parallel_size=2, pipeline_layers=[1, 1], micro_batches=2)
    assert staged.of_draft_model("small").num_ranks == 1
    alone, _ = run_on_ranks(model, 1, PROMPTS)
    shared, _ = run_on_ranks(model, 2, PROMPTS, expert_copies_interval=3, **settings)
    assert tokens_of_each(shared) == tokens_of_each(alone)
