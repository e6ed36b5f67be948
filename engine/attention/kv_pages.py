"""The memory behind KV page ids, and operations that store KV into it and read from it."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from cache import PageCopy
from engine.attention.pinned import on_device
from engine.attention.state_slots import LayerState, StateSlots
from engine.base.host_memory import untouched_zeros
from engine.kernels import native
from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import LayerGroups, Place, one_group

FP8 = torch.float8_e4m3fn
"""Element type of 8-bit pages."""
MAX_FP8 = torch.finfo(FP8).max

KVScales = tuple[float, float]
"""Divisors of a layer's keys and of its values when they are stored."""
UNSCALED: KVScales = (1.0, 1.0)
"""Scales of pages of the model's own type."""


class KVPages:
    """Keys and values of all layers, in one tensor, so that one operation copies a page in all layers; and the
    states of recurrent layers, which have no pages. If layers are in several groups (`LayerGroups`), a page
    belongs to one group, and `num_layers` below counts those of a group.

        data: [num_layers, 2 (keys, values), num_pages + 1, page_size, num_kv_heads, head_dim]
        latent KV, whose values are the first numbers of its keys (`LatentAttentionConfig`):
              [num_layers, 1 (keys),         num_pages + 1, page_size, 1,            head_dim]
        layers with different heads (Gemma 4), each of which has a view of a part of its numbers:
              [num_layers, 2,                num_pages + 1, page_size, 1,            most numbers of all]

    The shape of `data` is the only description of pages for all code that copies, stores, sends or counts them.
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
        places: Sequence[Place] | None = None,
        num_groups: int = 1,
        num_spare: int = 0,
    ) -> None:
        """Allocate zeroed pages. On a CPU, the system allocates memory when pages are first written, in units of
        up to 2 MiB for each layer's keys and for its values. `parts`: 2, or 1 if values are part of keys.

        `num_layers`: those whose KV is in one page. `places`: each layer's memory, in its group's pages or in
        `states`; None: all layers are one group. `num_spare`: pages after the null page, which are never read.
        """
        self.states = states
        self.places = [Place(0, layer) for layer in range(num_layers)] if places is None else places
        self.num_groups = num_groups
        """Groups of layers with page tables of their own."""
        shape = (num_layers, parts, num_pages + 1 + num_spare, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.null_page = num_pages
        self.num_spare = num_spare
        self.data = (
            untouched_zeros(math.prod(shape) * dtype.itemsize, "kv_pages").view(dtype).view(shape)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )
        planes, item = self.data.flatten(0, 1), self.data.element_size()
        self._sizes = len(planes), *(stride * item for stride in planes.stride()[:3])
        self._copier = _copier(device)
        self._views = [None if place.is_recurrent else self._view(place) for place in self.places]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateSlots | None = None,
        groups: LayerGroups | None = None,
        num_spare: int = 0,
    ) -> KVPages:
        """Allocate the pages of a model, or of a rank's share of it. `states`: those of recurrent layers."""
        parts, heads, numbers = model.kv_shape
        num_layers = model.num_kv_layers if groups is None else groups.num_layers
        places = one_group(model) if groups is None else groups.places
        num_groups = 1 if groups is None else groups.num_groups
        rest = parts, states, places, num_groups, num_spare
        return cls(num_layers, num_pages, page_size, heads, numbers, dtype, device, *rest)

    def layer(self, index: int) -> torch.Tensor:
        """Return a view of one of a group's layers: [2 or 1, num_pages + 1, page_size, num_kv_heads, head_dim]."""
        return self.data[index]

    def memory(self, layer: int) -> torch.Tensor | LayerState:
        """Return the memory of one of all layers: its pages, or its states."""
        view = self._views[layer]
        if view is not None:
            return view
        assert self.states is not None, "a recurrent model has states"
        return self.states.layer(self.places[layer].number)

    def _view(self, place: Place) -> torch.Tensor:
        pages = self.layer(place.number)
        if place.heads is None:
            return pages
        own = pages.flatten(3)[..., : math.prod(place.heads)]
        return own.view(*own.shape[:3], *place.heads)

    @property
    def raw(self) -> torch.Tensor:
        """`data` for operations that only move numbers: as integers if torch lacks operations for the type."""
        return _movable(self.data)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages in all layers; all sources are read before any target is written.

        Slots past `num_tokens` are not read before they are overwritten: they are copied or not, whichever is
        faster. Of a page that several ranks divide, each copies at most its part.
        """
        if not copies:
            return
        if len(copies) == 1 and self._copier is None:  # takes a quarter of the time of operations by index
            self.raw[:, :, copies[0].target] = self.raw[:, :, copies[0].source]
            return
        sources, targets, _ = zip(*copies, strict=True)
        if self._copier is not None and set(sources).isdisjoint(targets):
            own = [(source, target, min(count, self.page_size)) for source, target, count in copies]
            orders = (ctypes.c_int64 * (3 * len(own)))(*chain.from_iterable(own))
            self._copier(self.data.data_ptr(), *self._sizes, orders, len(copies))
            return
        pages = on_device(np.array([sources, targets], dtype=np.int64), self.data.device)
        self.raw.index_copy_(2, pages[1], self.raw.index_select(2, pages[0]))


def _copier(device: torch.device) -> Callable[..., None] | None:
    """Return the function that copies pages in a CPU's memory; None if torch has to."""
    with contextlib.suppress(native.NativeUnavailable):
        return native.page_copier() if device.type == "cpu" else None
    return None


def store_kv(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    scales: KVScales = UNSCALED,
) -> None:
    """Write a step's keys and values, [N, num_kv_heads, head_dim], into one layer's pages, at int64 [N] slots.
    `value` is None if keys contain the values.

    For float8 pages they are divided by the scales and clamped to the largest float8 number.
    """
    slots = pages.view(len(pages), -1, *pages.shape[3:])  # A view, never a copy: it is written to.
    parts = (key,) if value is None else (key, value)
    for kind, new, scale in zip(slots, parts, scales[: len(parts)], strict=True):
        if kind.dtype == FP8:
            new = (new.float() / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8)
        _movable(kind).index_copy_(0, slot_mapping, _movable(new))


def copy_slots(
    source: torch.Tensor, source_slots: torch.Tensor, target: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Copy KV at int64 [N] slots of one layer's pages to others of its pages, which may be of different number."""
    for origin, kind in zip(source.flatten(1, 2), target.view(len(target), -1, *target.shape[3:]), strict=True):
        _movable(kind).index_copy_(0, target_slots, _movable(origin).index_select(0, source_slots))


def gathered(
    pages: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scales: KVScales, latent: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values, each [N, num_kv_heads, head_dim], at int64 [N] slots of one layer's pages.
    `latent`: how many of a key's numbers are its value; None: pages hold values separately.
    """
    parts = [kind.index_select(0, slots) for kind in pages.flatten(1, 2)]
    if parts[0].dtype == FP8:
        parts = [(part.float() * scale).to(dtype) for part, scale in zip(parts, scales, strict=False)]
    return parts[0], parts[1] if latent is None else parts[0][..., :latent]


def _movable(numbers: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a type that all of torch's copying operations support."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers
