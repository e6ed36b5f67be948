"""The memory behind KV page ids, and how KV is stored into and read from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cache import PageCopy
from engine.attention.pinned import on_device
from engine.attention.state_slots import LayerState, StateSlots
from engine.host_memory import untouched_zeros
from engine.models.config import ModelConfig

FP8 = torch.float8_e4m3fn
"""Element type of 8-bit pages."""
MAX_FP8 = torch.finfo(FP8).max

KVScales = tuple[float, float]
"""Divisors of a layer's keys and of its values when they are stored."""
UNSCALED: KVScales = (1.0, 1.0)
"""Scales of pages of the model's own type."""


class LayerMemory(NamedTuple):
    """Where one of a model's layers keeps what it has to remember."""

    place: int
    """Its pages or its states, counted among those of all layers that have the same."""
    is_recurrent: bool = False
    """Whether it has states in place of pages."""
    heads: tuple[int, int] | None = None
    """Its heads and their numbers, where pages have room for those of other layers; None: as pages have them."""


class KVPages:
    """Keys and values of all layers, in one tensor, so that one operation copies a page in all layers; and beside
    it, the states of recurrent layers, which have no pages.

        data: [num_layers, 2 (keys, values), num_pages + 1, page_size, num_kv_heads, head_dim]
        latent KV, whose values are the first numbers of its keys (`LatentAttentionConfig`):
              [num_layers, 1 (keys),         num_pages + 1, page_size, 1,            head_dim]
        layers with different heads (Gemma 4), each of which has a view of a part of its numbers:
              [num_layers, 2,                num_pages + 1, page_size, 1,            most numbers of all]

    The shape of `data` is the one description of pages for all who copy, store, send or count them.
    The last page is the null page: never written, always zero. Padding points to it, so that values gathered for
    masked positions are finite whatever other pages held before (0 * NaN would be NaN).
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: int = 2,
        states: StateSlots | None = None,
        layers: Sequence[LayerMemory] | None = None,
    ) -> None:
        """Allocate zeroed pages. On a CPU, memory is taken from the system when pages are first written, in units
        of up to 2 MiB for each layer's keys and for its values. `parts`: 2, or 1 where values do not lie apart.

        `layers` says what each of all layers has; None: each has pages, of which there are `num_layers`.
        """
        self.states = states
        shape = (num_layers, parts, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.null_page = num_pages
        self.data = (
            untouched_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._layers = [LayerMemory(place) for place in range(num_layers)] if layers is None else layers
        self._views = [None if layer.is_recurrent else self._view(layer) for layer in self._layers]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateSlots | None = None,
    ) -> KVPages:
        """Allocate the pages of a model, or of a rank's share of it. `states`: those of recurrent layers."""
        parts, heads, numbers = model.kv_shape
        layers = _memory_of_layers(model)
        return cls(model.num_kv_layers, num_pages, page_size, heads, numbers, dtype, device, parts, states, layers)

    def layer(self, index: int) -> torch.Tensor:
        """Return a view of one of the layers that have pages, counted without the others: [2 or 1, num_pages + 1,
        page_size, num_kv_heads, head_dim].
        """
        return self.data[index]

    def memory(self, layer: int) -> torch.Tensor | LayerState:
        """Return what one of all layers has: its pages, or its states."""
        view = self._views[layer]
        if view is not None:
            return view
        assert self.states is not None, "a recurrent model has states"
        return self.states.layer(self._layers[layer].place)

    def _view(self, layer: LayerMemory) -> torch.Tensor:
        pages = self.layer(layer.place)
        if layer.heads is None:
            return pages
        own = pages.flatten(3)[..., : math.prod(layer.heads)]
        return own.view(*own.shape[:3], *layer.heads)

    @property
    def raw(self) -> torch.Tensor:
        """`data` for operations that only move numbers: as integers where torch lacks operations for the type."""
        return _movable(self.data)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in all layers; all sources are read before any target is written.

        Whole pages are copied: slots past `num_tokens` hold nothing that is read before it is written anew.
        """
        if not copies:
            return
        if len(copies) == 1:  # as in most steps: a fourth of what the operations by index take
            self.raw[:, :, copies[0].target] = self.raw[:, :, copies[0].source]
            return
        pairs = np.array([(copy.source, copy.target) for copy in copies], dtype=np.int64)
        sources, targets = on_device(pairs.T.copy(), self.data.device)
        self.raw.index_copy_(2, targets, self.raw.index_select(2, sources))


def _memory_of_layers(model: ModelConfig) -> list[LayerMemory]:
    """Return what each layer of a model has. Those that attend to another one's keys and values have its pages."""
    found: list[LayerMemory] = []
    num_pages = num_states = 0
    for index, layer in enumerate(model.layers):
        shape = model.attention_in(index).kv_shape
        heads = None if layer.is_recurrent or shape == model.kv_shape else shape[1:]
        if layer.is_recurrent:
            found.append(LayerMemory(num_states, is_recurrent=True))
            num_states += 1
        elif layer.kv_of is not None:
            found.append(found[layer.kv_of])
        else:
            found.append(LayerMemory(num_pages, heads=heads))
            num_pages += 1
    return found


def store_kv(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    scales: KVScales = UNSCALED,
) -> None:
    """Write a step's keys and values, [N, num_kv_heads, head_dim], into one layer's pages, at int64 [N] slots.
    `value` is None where keys hold the values.

    For float8 pages they are divided by the scales and clamped to the largest float8 number.
    """
    slots = pages.view(len(pages), -1, *pages.shape[3:])  # A view, never a copy: it is written to.
    parts = (key,) if value is None else (key, value)
    for kind, new, scale in zip(slots, parts, scales[: len(parts)], strict=True):
        if kind.dtype == FP8:
            new = (new.float() / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8)
        _movable(kind).index_copy_(0, slot_mapping, _movable(new))


def gathered(
    pages: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scales: KVScales, latent: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values, each [N, num_kv_heads, head_dim], at int64 [N] slots of one layer's pages.
    `latent`: how many of a key's numbers are its value; None: pages hold values apart.
    """
    parts = [kind.index_select(0, slots) for kind in pages.flatten(1, 2)]
    if parts[0].dtype == FP8:
        parts = [(part.float() * scale).to(dtype) for part, scale in zip(parts, scales, strict=False)]
    return parts[0], parts[1] if latent is None else parts[0][..., :latent]


def _movable(numbers: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a type that all of torch's copying operations support."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers
