"""The layers of one stage of a pipeline (Huang et al. 2019, arXiv:1811.06965).

    stage 0   embedding ─▶ layers 0 .. 9  ── hidden states of all tokens ──▶ stage 1   layers 10 .. 20
              norm, head, sampler ◀── hidden states of the tokens that sample ──┘

The last stage sends hidden states back, not logits: a row of them is as long as the model is wide, a row of logits
as long as the vocabulary. Embedding and output head, often one table, are therefore on the same stage, and so is
the sampler, which knows the requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model_config.config import ModelConfig


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

    def all_layers(self, num_layers: int) -> list[range]:
        """Return the layers of all stages."""
        return [replace(self, number=number).layers(num_layers) for number in range(self.count)]

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
