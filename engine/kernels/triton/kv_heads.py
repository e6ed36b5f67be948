"""Query heads and the KV that they share, as attention programs divide them.

plain     a program has the query heads of one KV head
latent    all query heads share one key, and its first numbers are its value (MLA): a program has a block of
          the query heads, and each block reads the same KV

latent key    [ head_dim ...... | rest ]
its value     [ head_dim ...... ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

_LATENT_ROWS, _ROWS = 32, 128
"""Most queries of a program, one for each token and head; the first with latent KV, whose results take four times
the registers. Some GPUs' products of 64 rows would also need more shared memory than there is."""


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The heads of a layer."""

    count: int
    """KV heads; with latent KV, blocks of query heads."""
    group: int
    """Query heads of each."""
    head_dim: int
    """Numbers of a value."""
    rest: int = 0
    """Numbers of a latent key after its value; 0: keys and values are separate, and have the same size."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, latent: int | None = None) -> Self:
        """Divide a layer's query heads. head_dim: of keys; latent: numbers of a key that are its value, or None if
        values are separate.
        """
        if latent is None:
            return cls(num_kv_heads, num_heads // num_kv_heads, head_dim)
        assert latent < head_dim, "positions rotate some numbers of a key, and none of its value"
        group = next(n for n in range(min(num_heads, _LATENT_ROWS), 0, -1) if num_heads % n == 0)
        return cls(num_heads // group, group, latent, head_dim - latent)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.count * self.group

    @property
    def most_rows(self) -> int:
        """Most queries of a program, one for each token and head."""
        return _LATENT_ROWS if self.rest else _ROWS

    def kv_strides(self, pages: torch.Tensor) -> tuple[int, int, int]:
        """Return the distances of pages, of a page's positions, and of KV heads, in a layer's pages
        [2 or 1, num_pages, page_size, num_kv_heads, head_dim].
        """
        page, position, head = pages.stride()[1:4]
        return page, position, 0 if self.rest else head
