"""The memory behind page ids."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cache import PageCopy
from engine.host_memory import untouched_zeros


class KVPages:
    """Keys and values of all layers, in one tensor so that a page is copied in one operation for all of them.

        data: [num_layers, 2 (keys, values), num_pages + 1, page_size, num_kv_heads, head_dim]

    The last page is the null page: never written, always zero. Padding points to it, so that what is gathered for
    masked positions is finite whatever a page held before (0 * NaN would be NaN).
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
    ) -> None:
        """Allocate the pages, zeroed. On a CPU, memory is taken from the system as pages are first written: up to
        2 MiB for each layer's keys, and values.
        """
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.null_page = num_pages
        self.data = (
            untouched_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )

    def layer(self, index: int) -> torch.Tensor:
        """One layer's [2, num_pages + 1, page_size, num_kv_heads, head_dim], a view."""
        return self.data[index]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in all layers; all sources are read before any target is written.

        Whole pages are copied: slots past `num_tokens` hold nothing that is read before it is written anew.
        """
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies], device=self.data.device)
        targets = torch.tensor([copy.target for copy in copies], device=self.data.device)
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))


def store_kv(pages: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write a step's keys and values, [N, num_kv_heads, head_dim], into one layer's pages, at int64 [N] slots."""
    keys, values = pages.flatten(1, 2).unbind()  # each [slots, num_kv_heads, head_dim]
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)
