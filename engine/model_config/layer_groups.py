"""Groups of layers with their own page tables, in models that mix layers with a window and layers without.

    layers     w w w w w f w w w w w f        w: sees a window, f: sees everything
    group      1 1 2 2 3 0 3 4 4 5 5 0        each has as many layers as there are f
    place      0 1 0 1 0 0 1 0 1 0 1 1

A page holds `page_size` tokens of the layers of any one group, so all groups use pages of one memory. Tokens have
a page of group 0 while their request lives, and pages of the other groups while they are in the window. If the
windowed layers do not fill their last group, its pages have unused room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cache import Window
from engine.model_config.config import ModelConfig
from engine.model_parts.parts import LayerKind

_MAX_UNUSED = 0.25
"""Largest share of unused room in the pages of a token."""


class Place(NamedTuple):
    """The place of a layer's memory."""

    group: int
    """Its page table; 0 for layers without a window."""
    number: int
    """Its number among the layers of its group, or among the recurrent layers."""
    is_recurrent: bool = False
    """Whether it has states instead of pages."""
    heads: tuple[int, int] | None = None
    """Its heads and their sizes, if pages have room for larger ones of other layers; None: those of pages."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How the layers of a model share pages."""

    num_layers: int
    """Layers of a group."""
    num_groups: int
    """Number of groups; the first has the layers without a window."""
    window: int
    """Most positions that the other groups' layers see."""
    places: Sequence[Place]
    """The place of each layer."""

    @classmethod
    def of(cls, model: ModelConfig) -> LayerGroups | str:
        """Return the groups of a model, or why its layers share one page table."""
        spans = [_span(layer) for layer in model.layers]
        windowed = [span for span in spans if span is not None]
        num_full = len(spans) - len(windowed)
        if model.delta_net is not None or not windowed:
            return "no layers of its attention have a window"
        if len(model.kinds_of_heads) > 1 or any(layer.kv_of is not None for layer in model.layers):
            return "its layers have heads of several kinds, or share keys and values"
        if not num_full:
            return "all of its layers have a window, so no page table would show which prefixes are held"
        num_groups = 1 + -(-len(windowed) // num_full)
        if num_groups * num_full > (1 + _MAX_UNUSED) * len(spans):
            return f"{len(windowed)} of its {len(spans)} layers have a window: too few for pages of their own"
        places, seen = [], [0, 0]
        for span in spans:
            number = seen[span is not None]
            seen[span is not None] += 1
            group = 0 if span is None else 1 + number // num_full
            places.append(Place(group, number % num_full))
        return cls(num_full, num_groups, max(windowed), tuple(places))

    def part(self, layers: range) -> LayerGroups:
        """Return the same groups with only the layers of a stage, whose pages have the whole's numbers."""
        if len(layers) == len(self.places):
            return self
        places, seen = [], [0] * self.num_groups
        for index in layers:
            group = self.places[index].group
            places.append(Place(group, seen[group]))
            seen[group] += 1
        return replace(self, num_layers=max(seen), places=tuple(places))

    def for_cache(self, max_step_tokens: int) -> Window:
        """Return the parameters of the layers with a window for the cache."""
        return Window(self.window, self.num_groups - 1, max_step_tokens)

    def bytes_per_token(self, in_all_layers: int) -> int:
        """Return the bytes of a token in one group, given its bytes in all layers."""
        return in_all_layers // len(self.places) * self.num_layers

    def most_tokens(self, num_pages: int, page_size: int, max_step_tokens: int) -> int:
        """Return how many tokens a request can have in so many pages."""
        return self.for_cache(max_step_tokens).most_slots(num_pages, page_size) * page_size

    def pages_for(self, num_tokens: int, page_size: int, num_planned: int = 1) -> int:
        """Return how many pages a request of so many tokens holds, with a chunk of `num_planned` at its end."""
        num_slots = -(-num_tokens // page_size)
        window = self.for_cache(num_planned)
        first = window.first_needed(max(0, num_tokens - num_planned), page_size)
        return num_slots + window.num_groups * (num_slots - first)


def one_group(model: ModelConfig) -> tuple[Place, ...]:
    """Return the places of layers that share one page table, and of those that keep a state. Layers that attend to
    another one's keys and values share its pages.
    """
    places: list[Place] = []
    num_pages = num_states = 0
    for index, layer in enumerate(model.layers):
        shape = model.attention_in(index).kv_shape
        heads = None if layer.is_recurrent or shape == model.kv_shape else shape[1:]
        if layer.is_recurrent:
            places.append(Place(0, num_states, is_recurrent=True))
            num_states += 1
        elif layer.kv_of is not None:
            places.append(places[layer.kv_of])
        else:
            places.append(Place(0, num_pages, heads=heads))
            num_pages += 1
    return tuple(places)


def _span(layer: LayerKind) -> int | None:
    """Return the most positions that a layer sees; None for all."""
    return layer.chunk if layer.window is None else layer.window
