"""What a layer computes beside matrix products and attention, as few kernels: the seam between decoder and device.

x, branch ─ add, norm ─▶ x, normed        heads ─ (q/k norm) ─ rotate ─▶ queries        gate, up ─▶ silu(gate) * up
                                                    └─ keys, values ─▶ pages
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales, store_kv
from engine.models.experts import ExpertsMLP, experts_mlp
from engine.models.rope import RopeConfig

logger = logging.getLogger(__name__)


class Operations(Protocol):
    """The operations of one step's N tokens; made once a step, as all layers rotate by the same angles."""

    def add_norm(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` [N, hidden_size] with a branch's output added, if there is one, and that normed (RMS).

        `x` may be overwritten.
        """
        ...

    def rotate_into(
        self,
        pages: torch.Tensor,
        heads: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Rotate queries and keys, normed before if `norm` is given; write keys and values into a layer's pages.

        pages: [2, num_pages + 1, page_size, num_kv_heads, head_dim]
        heads: [N, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; may be overwritten
        norm: [num_heads + num_kv_heads, head_dim], weights of each query and key head
        scales: what keys, and values, are divided by where pages are float8
        Returns the queries, [N, num_heads, head_dim]; dim 0 may be strided.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2 * inner], gates before ups, to silu(gate) * up, [N, inner]."""
        ...

    @property
    def experts(self) -> ExpertsMLP:
        """What computes a mixture of experts."""
        ...


class Rotary(NamedTuple):
    """What turns positions into angles, on the model's device."""

    inv_freq: torch.Tensor
    """float32 [head_dim / 2], radians a position."""
    factor: float
    """What cosines and sines are multiplied with."""
    dtype: torch.dtype
    """The type of heads, to which cosines and sines are rounded."""

    @classmethod
    def of(cls, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """That of a model."""
        frequencies = rope.inverse_frequencies(head_dim)
        return cls(torch.tensor(frequencies, dtype=torch.float32, device=device), rope.attention_factor, dtype)


def operations_for(rotary: Rotary) -> Callable[[AttentionBatch], Operations]:
    """What makes a step's operations: Triton's on a GPU where it imports, else torch's."""
    if rotary.inv_freq.is_cuda:
        try:
            from engine.models.triton_operations import TritonOperations

            return partial(TritonOperations, rotary)
        except ImportError as error:
            logger.warning("layers run on plain torch, with three times the kernels: %s; install triton", error)
    return partial(TorchOperations, rotary)


class TorchOperations:
    """The operations that run everywhere and that others are compared with."""

    experts = staticmethod(experts_mlp)

    def __init__(self, rotary: Rotary, batch: AttentionBatch) -> None:
        self._slots = batch.slot_mapping
        angles = batch.positions[:, None, None].float() * rotary.inv_freq
        cos, sin = angles.cos() * rotary.factor, angles.sin() * rotary.factor
        self._cos = torch.cat((cos, cos), -1).to(rotary.dtype)  # [N, 1, head_dim]
        self._sin = torch.cat((-sin, sin), -1).to(rotary.dtype)

    def add_norm(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Operations` says."""
        x = x if branch is None else x + branch
        return x, F.rms_norm(x, weight.shape, weight, eps)

    def rotate_into(
        self,
        pages: torch.Tensor,
        heads: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """As `Operations` says."""
        num_kv_heads = pages.shape[3]
        query_key, value = heads.tensor_split((-num_kv_heads,), dim=1)
        if norm is not None:
            query_key = F.rms_norm(query_key, heads.shape[2:], eps=eps) * norm
        query, key = self._rotate(query_key).tensor_split((-num_kv_heads,), dim=1)
        store_kv(pages, self._slots, key, value, scales)
        return query

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `Operations` says."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Pairs are (i, i + head_dim / 2), as in transformers' `rotate_half`."""
        first, second = heads.chunk(2, -1)
        return heads * self._cos + torch.cat((second, first), -1) * self._sin
