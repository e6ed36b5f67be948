"""Divides a model's layers into stages, so that the slowest stage of a pipeline is as fast as possible.

A stage can be any consecutive layers that have keys and values of their own and share none with other stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from engine.model_config.config import ModelConfig
from engine.parallel.stage import Stage, part_of
from engine.settings.config import EngineConfig

_TOKENS = 64
"""Tokens of the step by whose cost layers are divided: they decide how many experts are read."""


def stages_of(model: ModelConfig, config: EngineConfig) -> list[Stage]:
    """Return the stages of a model with these settings. Raises ValueError if they do not suit the model."""
    sizes = config.pipeline_layers
    if sizes is None:
        return divided(model, config.pipeline_parallel_size)
    borders = [0, *accumulate(sizes)]
    if borders[-1] != model.num_layers:
        raise ValueError(
            f"pipeline_layers is {sizes}, which are {borders[-1]} layers, but the model "
            f"({model.architecture}) has {model.num_layers}"
        )
    for number, layers in enumerate(pairwise(borders)):
        if not _can_be_stage(model, range(*layers)):
            raise ValueError(
                f"pipeline_layers is {sizes}, but layers {layers[0]} to {layers[1] - 1} of this model "
                f"({model.architecture}) cannot be stage {number}: a stage has keys and values, and shares none "
                "with another"
            )
    return _with_starts(borders[:-1])


def divided(model: ModelConfig, count: int) -> list[Stage]:
    """Return a model's `count` stages.

    The cost of a layer is the number of weights that a step reads; the first stage reads the output head, too. A
    measured time would differ a little from replica to replica, and so might their stages, which could then not
    exchange KV. Raises ValueError if the model cannot have so many stages.
    """
    starts = _best_starts(model, count, _costs(model), model.vocab_size * model.hidden_size)
    if starts is None:
        raise ValueError(
            f"pipeline_parallel_size is {count}, but the {model.num_layers} layers of this model "
            f"({model.architecture}) can be divided into at most {most_stages(model)} stages, each with keys and "
            "values of its own; lower it"
        )
    return _with_starts(starts)


def better_sizes(model: ModelConfig, stage: Stage, seconds: Sequence[float], head_s: float) -> list[int]:
    """Return the number of layers that each stage should have by the time that each took for a step, of which the
    output head took `head_s`.
    """
    costs = _costs(model)
    of_layers = [seconds[0] - head_s, *seconds[1:]]
    for own, whole in zip(stage.all_layers(model.num_layers), of_layers, strict=True):
        per_weight = whole / sum(costs[layer] for layer in own)
        for layer in own:
            costs[layer] *= per_weight
    starts = _best_starts(model, stage.count, costs, head_s) or stage.starts
    return [end - start for start, end in pairwise((*starts, model.num_layers))]


def most_stages(model: ModelConfig) -> int:
    """Return the largest number of stages of a model."""
    most = [0]  # stages of the layers before each one, 0 if they cannot be divided
    for end in range(1, model.num_layers + 1):
        starts = [
            start
            for start in range(end)
            if (start == 0 or most[start]) and _can_be_stage(model, range(start, end))
        ]
        most.append(max((most[start] + 1 for start in starts), default=0))
    return most[-1]


def _with_starts(starts: Sequence[int]) -> list[Stage]:
    return [Stage(number, tuple(starts)) for number in range(len(starts))]


def _best_starts(model: ModelConfig, count: int, costs: Sequence[float], head: float) -> tuple[int, ...] | None:
    """Return the first layer of each stage, given the costs of the layers and of the output head; None if the
    model cannot have so many stages.
    """
    num_layers, until = model.num_layers, [0.0, *accumulate(costs)]

    @cache
    def is_possible(start: int, end: int) -> bool:
        return _can_be_stage(model, range(start, end))

    # best[end]: the largest cost of the stages of the layers before `end`, and where they start.
    best: list[tuple[float, tuple[int, ...]] | None] = [
        (head + until[end], (0,)) if is_possible(0, end) else None for end in range(num_layers + 1)
    ]
    for _ in range(count - 1):
        best = [
            min(
                (
                    (max(before[0], until[end] - until[start]), (*before[1], start))
                    for start, before in enumerate(best[:end])
                    if before is not None and is_possible(start, end)
                ),
                default=None,
            )
            for end in range(num_layers + 1)
        ]
    return None if best[-1] is None else best[-1][1]


def _can_be_stage(model: ModelConfig, layers: range) -> bool:
    """Whether these layers have keys and values of their own, and use none of other layers."""
    sources = [model.layers[i].kv_of for i in layers]
    has_kv = any(model.layers[i].kv_of is None and not model.layers[i].is_recurrent for i in layers)
    return has_kv and all(source is None or source in layers for source in sources)


def _costs(model: ModelConfig) -> list[float]:
    """Return the number of weights of each layer that a step reads."""
    tables = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    plain = replace(model, inputs=None)
    layers = range(model.num_layers)
    return [part_of(plain, range(i, i + 1)).parameters_read(_TOKENS) - tables for i in layers]
