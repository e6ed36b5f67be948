"""The layers of one stage of a pipeline (Huang et al. 2019, arXiv:1811.06965).

    stage 0   embedding ─▶ layers 0 .. 9  ── hidden states of all tokens ──▶ stage 1   layers 10 .. 20
              norm, head, sampler ◀── hidden states of the tokens that sample ──┘

The last stage sends hidden states back, not logits: a row of them is as long as the model is wide, a row of logits
as long as the vocabulary. Embedding and output head, often one table, are therefore on the same stage, and so is
the sampler, which knows the requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.model_config.config import ModelConfig

_TOKENS = 64
"""Tokens of the step by whose cost layers are divided: they decide how many experts are read."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline."""

    number: int = 0
    starts: tuple[int, ...] = (0,)
    """The first layer of each stage."""

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.starts)

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding and the output head, too."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether the next stage is the first one."""
        return self.number == self.count - 1

    @property
    def suffix(self) -> str:
        """The division as a part of a name; "" for one stage."""
        return "" if self.count == 1 else "-stages-" + "-".join(map(str, self.starts))

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage, of `num_layers` in the model."""
        return range(num_layers)[self.starts[self.number] : (*self.starts, num_layers)[self.number + 1]]

    def has(self, parameter: str, num_layers: int) -> bool:
        """Whether this stage has a parameter of the decoder: those of its layers, and the first all others."""
        part, _, rest = parameter.partition(".")
        return int(rest.partition(".")[0]) in self.layers(num_layers) if part == "layers" else self.is_first

    def of(self, model: ModelConfig) -> ModelConfig:
        """Return the shape of this stage's layers. The vocabulary stays."""
        return model if self.count == 1 else part_of(model, self.layers(model.num_layers))


def part_of(model: ModelConfig, layers: range) -> ModelConfig:
    """Return a model of some consecutive layers of `model`."""
    first, experts = layers.start, model.experts
    if experts is not None:
        experts = replace(experts, layers=frozenset(i - first for i in experts.layers if i in layers))
    own = (model.layers[i] for i in layers)
    moved = (each if each.kv_of is None else replace(each, kv_of=each.kv_of - first) for each in own)
    return replace(model, layers=tuple(moved), experts=experts if experts is not None and experts.layers else None)


def starts_of_stages(model: ModelConfig, count: int) -> tuple[int, ...]:
    """Return the first layer of each of `count` stages, so that the slowest is as fast as possible.

    The cost of a layer is the number of weights that a step reads; the first stage reads the output head, too.
    Every stage has keys and values, and those that layers share stay on one stage. Raises ValueError if there are
    fewer such stages than `count`.
    """
    borders = [0, *possible_borders(model), model.num_layers]
    if count > len(borders) - 1:
        raise ValueError(
            f"pipeline_parallel_size is {count}, but the {model.num_layers} layers of this model "
            f"({model.architecture}) can be divided into at most {len(borders) - 1} stages, each with keys and "
            "values of its own; lower it"
        )
    costs = [0.0, *accumulate(_cost(model, range(i, i + 1)) for i in range(model.num_layers))]
    head = model.vocab_size * model.hidden_size
    # best[j]: the slowest of the stages before border j, and their starts.
    best: list[tuple[float, tuple[int, ...]]] = [(head + costs[border], (0,)) for border in borders]
    for number in range(1, count):
        best = [
            min(
                (
                    (max(best[i][0], costs[borders[j]] - costs[borders[i]]), (*best[i][1], borders[i]))
                    for i in range(number, j)
                ),
                default=(math.inf, ()),
            )
            for j in range(len(borders))
        ]
    return best[-1][1]


def possible_borders(model: ModelConfig) -> list[int]:
    """Return the layers with which a stage can begin, except the first."""
    found, start = [], 0
    shared = [layer.kv_of for layer in model.layers]
    for border in range(1, model.num_layers):
        is_cut = any(other is not None and other < border for other in shared[border:])
        has_kv = part_of(model, range(start, border)).num_kv_layers if not is_cut else 0
        if has_kv and part_of(model, range(border, model.num_layers)).num_kv_layers:
            found.append(border)
            start = border
    return found


def _cost(model: ModelConfig, layers: range) -> float:
    """Return the number of weights of these layers that a step reads."""
    tables = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return replace(part_of(model, layers), inputs=None).parameters_read(_TOKENS) - tables
