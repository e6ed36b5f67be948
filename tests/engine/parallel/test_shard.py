"""Which part of a matrix each rank holds, and which sizes are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.parallel.collective import Collective
from engine.parallel.shard import Shard, check_context, check_divides, sizes_for_context
from engine.ranks.load_on_ranks import load_on_ranks
from engine.ranks.rank_group import check_alike
from engine.settings.config import EngineConfig
from tests.engine.support.oracle import save_tiny
from tests.engine.support.published_models import PUBLISHED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight query heads, two key-value heads, 96 inner columns, 101 tokens; with biases."""
    return save_tiny("llama_biased", tmp_path_factory.mktemp("model"), num_attention_heads=8)


@pytest.fixture(scope="module")
def config(model: Path) -> ModelConfig:
    return ModelConfig.from_directory(model)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_query_head_lies_with_its_key_value_head(config: ModelConfig, num_heads: int, size: int) -> None:
    """Query head h attends to key-value head h // group, on one rank as on many."""
    group = 8 // num_heads
    for shard in (Shard(rank, size) for rank in range(size)):
        queries, kv = shard.part(8), shard.kv_part(num_heads)
        own = shard.attention(replace(config.attention, num_kv_heads=num_heads))
        for index, head in enumerate(range(8)[queries]):
            assert range(num_heads)[kv][index // (own.num_heads // own.num_kv_heads)] == head // group


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100, 101, 150])
def test_every_token_has_one_row(size: int) -> None:
    rows = [range(101)[Shard(rank, size).rows(101)] for rank in range(size)]
    assert [token for part in rows for token in part] == list(range(101))
    assert all(len(part) <= Shard(0, size).num_rows(101) for part in rows)


def test_weights_are_the_ranks_slices(model: Path, config: ModelConfig) -> None:
    whole = load_decoder(model, config, torch.float32, torch.device("cpu")).get_submodule("layers.1")
    parts = [
        load_decoder(model, config, torch.float32, torch.device("cpu"), ranks=Collective(Shard(rank, 4)))
        for rank in range(4)
    ]
    layers = [part.get_submodule("layers.1") for part in parts]

    def of(name: str) -> list[torch.Tensor]:
        return [layer.get_parameter(name) for layer in layers]

    assert torch.equal(torch.cat(of("attention.o_proj.weight"), 1), whole.get_parameter("attention.o_proj.weight"))
    assert torch.equal(torch.stack(of("mlp.down_proj.bias")).sum(0), whole.get_parameter("mlp.down_proj.bias"))
    fused = whole.get_parameter("attention.qkv_proj.bias").split((256, 64, 64))
    queries = torch.cat([part[:64] for part in of("attention.qkv_proj.bias")])
    keys = [part[64:96] for part in of("attention.qkv_proj.bias")]
    assert torch.equal(queries, fused[0])
    assert torch.equal(torch.cat(keys[::2]), fused[1]) and torch.equal(torch.cat(keys[1::2]), fused[1])
    table = torch.cat([part.get_parameter("embed.weight") for part in parts])
    assert table.shape == (104, 96) and not table[101:].any()


@pytest.mark.parametrize(
    ("size", "numbers"),
    [
        (3, "8 query heads, 2 key-value heads and 96 inner columns evenly; with this model it can be 1, 2, 4, 8"),
        (16, "1, 2, 4, 8"),
    ],
)
def test_a_size_that_does_not_divide_is_refused(config: ModelConfig, size: int, numbers: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size is {size}.*{numbers}"):
        check_divides(config, size)


@pytest.mark.parametrize(
    ("ranks", "possible"), [(1, [1]), (2, [1]), (4, [1, 2]), (8, [1, 2, 4]), (6, [1, 3]), (12, [1, 2, 3, 6])]
)
def test_ranks_with_the_same_key_value_head_divide_its_kv(
    config: ModelConfig, ranks: int, possible: list[int]
) -> None:
    """Two key-value heads: of eight ranks, four have the same one."""
    accepted = []
    for size in range(1, 2 * ranks):
        try:
            check_context(config, ranks, size)
            accepted.append(size)
        except ValueError as error:
            said = f"head is {max(1, ranks // 2)} (tensor_parallel_size is {ranks}, and the model has 2); "
            assert (
                str(error).partition(", or set ")[0].endswith(f"{said}it can be {', '.join(map(str, possible))}")
            )
    assert accepted == possible


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("openai/gpt-oss-20b", "GptOssForCausalLM.* a window or a chunk"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama4.* a window or a chunk"),
    ],
)
def test_kv_of_windows_and_chunks_is_not_divided(name: str, said: str) -> None:
    config = ModelConfig.from_json(PUBLISHED[name], {}, name)
    check_context(config, 16, 1)
    with pytest.raises(ValueError, match=f"context_parallel_size is 2, but .*{said}"):
        check_context(config, 16, 2)


def test_the_numbers_of_ranks_that_divide_the_kv_are_those_that_pass_both_checks(config: ModelConfig) -> None:
    assert [sizes_for_context(config, parts) for parts in (1, 2, 4)] == [[1, 2, 4, 8], [4, 8], [8]]
    with pytest.raises(ValueError, match=r"is 8, but .* head is 4 \(.* is 8, .* has 2\); .* 1, 2, 4$"):
        sizes_for_context(config, 8)
    windowed = ModelConfig.from_json(PUBLISHED["openai/gpt-oss-20b"], {}, "gpt-oss")
    with pytest.raises(ValueError, match="a window or a chunk"):
        sizes_for_context(windowed, 2)


def test_kv_of_different_heads_is_not_divided(config: ModelConfig) -> None:
    other = replace(config.layers[1], attention=replace(config.attention, num_kv_heads=1))
    mixed = replace(config, layers=(config.layers[0], other, *config.layers[2:]))
    with pytest.raises(ValueError, match=r"context_parallel_size is 2, but .* heads of several kinds"):
        check_context(mixed, 4, 2)


@pytest.mark.parametrize("found", [1, 3])
def test_fewer_gpus_than_ranks_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    config = EngineConfig(model=str(model), tensor_parallel_size=4)
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 4, but this machine has {found} GPU"):
        load_on_ranks(config)


def test_gpus_of_different_kinds_are_named() -> None:
    check_alike({0: "NVIDIA H100", 1: "NVIDIA H100"})
    with pytest.raises(ValueError, match=r"rank 0: NVIDIA H100, rank 1: NVIDIA A10.*one kind"):
        check_alike({1: "NVIDIA A10", 0: "NVIDIA H100"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be in"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "a GPU of its own"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**settings)


def test_eight_bits_need_the_native_kernels(model: Path) -> None:
    from engine.program.engine import Engine
    from tests.engine.support.rank_processes import Threads

    config = EngineConfig(model=str(model), device="cpu", tensor_parallel_size=2, quantization="int8")
    with pytest.raises(ValueError, match="quantization 'int8' is for the native kernels"):
        Engine.from_config(config, launcher=Threads())
