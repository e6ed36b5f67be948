"""A layer's operations as Triton kernels: one kernel for each operation, which reads its inputs once."""

from __future__ import annotations

import torch

from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.kernels.float8 import makes_fp8
from engine.kernels.triton.grouped_gemm import experts_mlp
from engine.kernels.triton.norm import add_norm, add_norm_fp8
from engine.kernels.triton.rope import rotate_into, rotations
from engine.kernels.triton.route import route
from engine.kernels.triton.silu import gated_fp8, gelu_mul, silu_mul
from engine.layers.linear import Rounded
from engine.layers.operations import Rotary


class TritonOperations:
    """Implements `Operations`; computes in float32 between reading and writing."""

    route = staticmethod(route)
    experts = staticmethod(experts_mlp)

    def __init__(self, rotary: Rotary, batch: AttentionBatch) -> None:
        self._slots = batch.slot_mapping
        self._rotations = rotations(batch.positions, *rotary)

    def add_norm(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `Operations`; `x` is overwritten."""
        return x, add_norm(x, branch, weight, eps)

    def add_norm_fp8(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float, inputs: int
    ) -> tuple[torch.Tensor, Rounded]:
        """Implement `Operations`; `x` is overwritten."""
        if not makes_fp8(x.device):
            return x, Rounded.of(add_norm(x, branch, weight, eps), inputs)
        return x, Rounded(*add_norm_fp8(x, branch, weight, eps, inputs), x.dtype)

    def rotate_into(
        self,
        pages: torch.Tensor,
        heads: torch.Tensor,
        rope: int,
        norm: torch.Tensor | None,
        eps: float,
        scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Implement `Operations`; the queries are a view of `heads`."""
        rotation = self._rotations[rope][..., : heads.shape[2] // 2].contiguous()
        return rotate_into(pages, self._slots, heads, rotation, norm, eps, scales)

    def rotate(self, heads: torch.Tensor, rope: int) -> torch.Tensor:
        """Implement `Operations` in plain torch."""
        first, second = heads.chunk(2, -1)
        cos, sin = self._rotations[rope][..., : first.shape[-1]].unsqueeze(2).unbind(1)  # [N, 1, turned_dim / 2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Implement `Operations`."""
        return silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Implement `Operations`."""
        return gelu_mul(gate_up)

    def gated_fp8(self, gate_up: torch.Tensor, inputs: int, *, is_gelu: bool) -> Rounded:
        """Implement `Operations`."""
        if not makes_fp8(gate_up.device):
            return Rounded.of(gelu_mul(gate_up) if is_gelu else silu_mul(gate_up), inputs)
        return Rounded(*gated_fp8(gate_up, inputs, is_gelu=is_gelu), gate_up.dtype)
