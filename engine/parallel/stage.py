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

    def held(self, model: ModelConfig) -> ModelConfig:
        """Return a model of the weights of this stage. The first has the tables, and all have the final norm."""
        return self.of(model) if self.is_first else replace(self.of(model), vocab_size=0)

    def weight_bytes(self, model: ModelConfig, element_bytes: int, quantization: str | None = None) -> int:
        """Return the bytes of this stage's weights, counted as `ModelConfig.weight_bytes` counts those of a model.

        If layers have inputs of their own, all stages have the embedding and the whole table of these inputs.
        """
        held = self.held(model)
        num_bytes = held.weight_bytes(element_bytes, quantization)
        if model.inputs is None:
            return num_bytes
        shared = model.inputs.num_shared(model.hidden_size, model.num_layers - held.num_layers)
        embedding = 0 if self.is_first else model.vocab_size * model.hidden_size
        return num_bytes + (shared + embedding) * element_bytes


WHOLE = Stage()
"""The only stage of a model that is not divided."""


def part_of(model: ModelConfig, layers: range) -> ModelConfig:
    """Return a model of some consecutive layers of `model`."""
    first, experts = layers.start, model.experts
    if experts is not None:
        experts = replace(experts, layers=frozenset(i - first for i in experts.layers if i in layers))
    own = (model.layers[i] for i in layers)
    moved = (each if each.kv_of is None else replace(each, kv_of=each.kv_of - first) for each in own)
    return replace(model, layers=tuple(moved), experts=experts if experts is not None and experts.layers else None)
