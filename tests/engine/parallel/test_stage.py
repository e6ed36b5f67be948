"""Stages have consecutive layers, so divided that the slowest is as fast as possible."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.loading.check_model import check_model
from engine.model_config.config import ModelConfig
from engine.parallel.division import better_sizes, divided, most_stages, stages_of
from engine.parallel.stage import Stage, part_of
from engine.settings.config import EngineConfig
from tests.engine.support.oracle import save_tiny


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Four layers, of which every other one has experts."""
    return ModelConfig.from_directory(save_tiny("qwen3_moe_mixed", tmp_path_factory.mktemp("mixed")))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Its last two of five layers attend to keys and values of earlier ones."""
    return ModelConfig.from_directory(save_tiny("gemma4_small", tmp_path_factory.mktemp("sharing")))


def weights(model: ModelConfig, layers: range) -> float:
    """Weights of some layers that a step of 64 tokens reads, without tables."""
    none = replace(model, layers=(), experts=None)
    return part_of(model, layers).parameters_read(64) - none.parameters_read(64)


@given(num_layers=st.integers(1, 9), count=st.integers(1, 4), vocab_size=st.integers(1, 4000))
def test_no_other_division_has_a_faster_slowest_stage(
    mixed: ModelConfig, num_layers: int, count: int, vocab_size: int
) -> None:
    sparse = frozenset(range(0, num_layers, 2))
    assert mixed.experts is not None
    model = replace(
        mixed,
        vocab_size=vocab_size,
        layers=mixed.layers[:1] * num_layers,
        experts=replace(mixed.experts, layers=sparse),
    )

    def slowest(starts: tuple[int, ...]) -> float:
        head = vocab_size * model.hidden_size
        ends = (*starts[1:], num_layers)
        stages = [weights(model, range(*each)) for each in zip(starts, ends, strict=True)]
        return max(stages[0] + head, *stages[1:], 0.0)

    if count > num_layers:
        with pytest.raises(
            ValueError, match=f"is {count}, but the {num_layers} layers .* at most {num_layers} st"
        ):
            divided(model, count)
        return
    others = [(0, *rest) for rest in itertools.combinations(range(1, num_layers), count - 1)]
    found = divided(model, count)[0].starts
    assert found in others
    assert slowest(found) == pytest.approx(min(map(slowest, others)))


def test_a_stage_has_its_layers_and_the_first_one_the_tables(mixed: ModelConfig) -> None:
    first, second = Stage(0, (0, 3)), Stage(1, (0, 3))
    assert [*first.layers(4), *second.layers(4)] == [0, 1, 2, 3]
    names = ["embed.weight", "lm_head.weight", "layers.2.mlp.router", "layers.3.attention.o_proj.weight"]
    assert [first.has(name, 4) for name in names] == [True, True, True, False]
    assert [second.has(name, 4) for name in names] == [False, False, False, True]
    whole, parts = mixed.experts, [stage.of(mixed) for stage in (first, second)]
    assert whole is not None and sorted(whole.layers) == [1, 3]
    assert [sorted(part.experts.layers) if part.experts else None for part in parts] == [[1], [0]]
    assert sum(part.kv_bytes_per_token(2) for part in parts) == mixed.kv_bytes_per_token(2)


def test_layers_that_share_keys_and_values_stay_on_one_stage(sharing: ModelConfig) -> None:
    sources = [layer.kv_of for layer in sharing.layers]
    for count in range(1, most_stages(sharing) + 1):
        *starts, end = *divided(sharing, count)[0].starts, len(sources)
        for first, last in itertools.pairwise((*starts, end)):
            part = part_of(sharing, range(first, last))
            moved = [None if source is None else source - first for source in sources[first:last]]
            assert [layer.kv_of for layer in part.layers] == moved
            assert None in moved and all(source is None or source >= 0 for source in moved)
    with pytest.raises(ValueError, match=f"at most {most_stages(sharing)} stages"):
        divided(sharing, most_stages(sharing) + 1)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ([1, 2], "is \\[1, 2\\], which are 3 layers, but the model .* has 5"),
        ([4, 1], "layers 4 to 4 of this model .* cannot be stage 1"),
        ([5, 0], "layers 5 to 4 of this model .* cannot be stage 1"),
    ],
)
def test_stages_as_configured(sharing: ModelConfig, sizes: list[int], complaint: str) -> None:
    def starts(sizes: list[int]) -> tuple[int, ...]:
        return stages_of(sharing, EngineConfig(pipeline_parallel_size=2, pipeline_layers=sizes))[1].starts

    assert starts([1, 4]) == (0, 1)
    with pytest.raises(ValueError, match=complaint):
        starts(sizes)
    with pytest.raises(ValueError, match="pipeline_layers has 3 numbers, but pipeline_parallel_size is 2"):
        starts([1, 1, 3])


def test_the_times_of_stages_tell_how_many_layers_each_should_have(mixed: ModelConfig) -> None:
    """A layer of the second stage takes three times as long as one of the first."""
    model = replace(mixed, layers=mixed.layers[:1] * 8, experts=None)
    assert better_sizes(model, Stage(0, (0, 4)), [4.0, 12.0], 0.0) == [5, 3]
    assert better_sizes(model, Stage(0, (0, 4)), [8.0, 4.0], 4.0) == [2, 6]


def test_more_stages_than_a_model_can_have_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model = save_tiny("qwen3_next", tmp_path)
    config = EngineConfig(model=str(model), device="cpu", pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"but the 4 layers of this model .* at most 1 stage"):
        check_model(config)
