"""A layer's operations in plain torch. They run everywhere, and tests compare the Triton ones with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales, store_kv
from engine.layers.linear import Rounded
from engine.layers.operations import Rotary
from engine.models.experts import experts_mlp, route


class TorchOperations:
    """Implements `Operations`."""

    route = staticmethod(route)
    experts = staticmethod(experts_mlp)

    def __init__(self, rotary: Rotary, batch: AttentionBatch) -> None:
        self._slots = batch.slot_mapping
        angles = batch.positions[:, None, None].float() * rotary.inv_freq[:, None, None]
        factor = rotary.factor[:, None, None]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = cos.to(rotary.dtype)  # [rotations, N, 1, head_dim / 2]
        self._sin = sin.to(rotary.dtype)

    def add_norm(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `Operations`."""
        x = x if branch is None else x + branch
        if weight.dtype != x.dtype:
            return x, F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return x, F.rms_norm(x, weight.shape, weight, eps)

    def add_norm_fp8(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float, inputs: int
    ) -> tuple[torch.Tensor, Rounded]:
        """Implement `Operations`."""
        x, normed = self.add_norm(x, branch, weight, eps)
        return x, Rounded.of(normed, inputs)

    def rotate_into(
        self,
        pages: torch.Tensor,
        heads: torch.Tensor,
        rope: int,
        norm: torch.Tensor | None,
        eps: float,
        scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Implement `Operations`."""
        num_kv_heads = pages.shape[3]
        query_key, value = heads.tensor_split((-num_kv_heads,), dim=1)
        if norm is not None:
            query_key = (F.rms_norm(query_key, heads.shape[2:], eps=eps) * norm).to(heads.dtype)
        query, key = self.rotate(query_key, rope).tensor_split((-num_kv_heads,), dim=1)
        store_kv(pages, self._slots, key, value, scales)
        return query

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Implement `Operations`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Implement `Operations`."""
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def gated_fp8(self, gate_up: torch.Tensor, inputs: int, *, is_gelu: bool) -> Rounded:
        """Implement `Operations`."""
        return Rounded.of(self.gelu_mul(gate_up) if is_gelu else self.silu_mul(gate_up), inputs)

    def rotate(self, heads: torch.Tensor, rope: int) -> torch.Tensor:
        """Implement `Operations`: rotate the pairs (i, i + head_dim / 2), as in transformers' `rotate_half`."""
        first, second = heads.chunk(2, -1)
        cos, sin = (part[rope, ..., : first.shape[-1]] for part in (self._cos, self._sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
