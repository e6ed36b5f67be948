"""Mixtures of experts on several ranks: a part of each expert on every rank, or whole experts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.check_model import check_model
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import demo_model_path
from engine.models.experts import Experts
from engine.parallel.collective import Collective
from engine.parallel.shard import Shard, check_divides
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
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


def test_a_draft_model_is_not_shared(tmp_path: Path) -> None:
    """The first rank has it whole, so it needs no experts, nor heads that ranks can share."""
    model = save_tiny("mixtral", tmp_path / "model", **SHAPE, num_local_experts=4)
    draft = save_tiny("qwen3", tmp_path / "draft", num_attention_heads=3, num_key_value_heads=1)
    for directory, path in product((model, draft), demo_model_path().glob("token*")):
        shutil.copy(path, directory)
    speculation = Speculation(method="draft_model", model=str(draft))
    settings: dict[str, Any] = {"expert_parallel": True, "speculation": speculation}
    check_model(ranks_config(model, 2, **settings))
    alone, _ = run_on_ranks(model, 1, PROMPTS)
    shared, _ = run_on_ranks(model, 2, PROMPTS, **settings)
    assert tokens_of_each(shared) == tokens_of_each(alone)
