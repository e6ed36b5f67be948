"""The interface between decoder and device: a layer's operations except matrix products and attention.

x, branch ─ add, norm ─▶ x, normed        heads ─ (q/k norm) ─ rotate ─▶ queries        gate, up ─▶ silu(gate) * up
                                                    └─ keys, values ─▶ pages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from engine.attention.kv_pages import UNSCALED, KVScales
from engine.layers.linear import Rounded
from engine.layers.matrix_stack import MatrixStack
from engine.model_parts.experts_config import Clamp
from engine.model_parts.rope import RopeConfig

Matrices = torch.Tensor | MatrixStack
"""The matrices of a layer's experts: plain numbers [E, outputs, inputs], or of some kind of linear layer."""


class Operations(Protocol):
    """The operations on one step's N tokens. Made once per step, because all layers rotate by the same angles."""

    def add_norm(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a branch's output, if there is one, to `x` [N, hidden_size]; return the sum and its RMS norm.

        `x` may be overwritten.
        """

    def add_norm_fp8(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float, inputs: int
    ) -> tuple[torch.Tensor, Rounded]:
        """Compute as `add_norm` does, for a layer that rounds to float8, `inputs` numbers with one scale."""

    def rotate_into(
        self,
        pages: torch.Tensor,
        heads: torch.Tensor,
        rope: int,
        norm: torch.Tensor | None,
        eps: float,
        scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Rotate queries and keys, normed first if `norm` is given; write keys and values into a layer's pages.

        pages: [2, num_pages + 1, page_size, num_kv_heads, head_dim]
        heads: [N, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; may be overwritten
        rope: index of the layer's rotation among those of the model
        norm: [num_heads + num_kv_heads, head_dim], the weights of each query and key head
        scales: keys and values are divided by these if pages are float8
        Returns the queries, [N, num_heads, head_dim]; dim 0 may be strided.
        """

    def rotate(self, heads: torch.Tensor, rope: int) -> torch.Tensor:
        """Rotate [N, heads, turned_dim] by the model's rotation number `rope`."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [N, 2 * inner], gates before ups, to silu(gate) * up, [N, inner]."""

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [N, 2 * inner], gates before ups, to gelu(gate) * up, [N, inner], by GELU's tanh approximation."""

    def gated_fp8(self, gate_up: torch.Tensor, inputs: int, *, is_gelu: bool) -> Rounded:
        """Compute as `silu_mul` or `gelu_mul` does, for a layer that rounds to float8 (as for `add_norm_fp8`)."""

    @property
    def route(self) -> Route:
        """The function that chooses each token's experts."""

    @property
    def experts(self) -> ExpertsMLP:
        """The function that computes a mixture of experts."""


class Route(Protocol):
    """Chooses experts by a softmax: in torch in `experts.py`, in Triton in `kernels/triton/route.py`."""

    def __call__(
        self, logits: torch.Tensor, per_token: int, renormalizes: bool, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [N, num_experts] to each token's experts, int64 [N, per_token], the most likely first, and their
        shares, float32 of that shape, which sum up to one if it `renormalizes`.
        """


class ExpertsMLP(Protocol):
    """Computes all tokens' experts: in torch in `experts.py`, in Triton in `kernels/triton/grouped_gemm.py`."""

    def __call__(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Matrices,
        down: Matrices,
        first_expert: int,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        clamp: Clamp | None = None,
        /,
        *,
        is_gelu: bool = False,
    ) -> torch.Tensor:
        """Map `x` [N, hidden_size] to each token's weighted sum of its experts' outputs, of the same shape.

        chosen: int64 [N, k], each token's experts; weights: float32 [N, k], their shares
        gate_up: of [2 * inner, hidden_size], gate rows first; down: of [hidden_size, inner]: the weights of the
            experts from `first_expert` on; experts that are not among them contribute zero
        biases: of `gate_up`, [E, 2 * inner], and of `down`, [E, hidden_size]
        clamp: the activation instead of SiLU
        is_gelu: whether gates go through GELU's tanh approximation instead of SiLU
        """


class Rotary(NamedTuple):
    """Constants that turn positions into angles, on the model's device, for each of a model's rotations."""

    inv_freq: torch.Tensor
    """float32 [rotations, head_dim / 2], radians per position. Smaller heads are rotated by the first of a row."""
    factor: torch.Tensor
    """float32 [rotations, head_dim / 2], factor of cosines and sines."""
    dtype: torch.dtype
    """Type of the heads, to which cosines and sines are rounded."""

    @classmethod
    def of(
        cls,
        ropes: Sequence[RopeConfig | None],
        dims: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Rotary:
        """Compute the constants of a model's rotations. `dims`: the `turned_dim` of all heads, or of those that
        each rotation turns; their other pairs are not rotated. Without a rotation (None), no pair is.
        """
        each = [dims] * len(ropes) if isinstance(dims, int) else list(dims)
        turned = [[] if rope is None else rope.pairs(dim) for rope, dim in zip(ropes, each, strict=True)]
        pairs = [own + [(0.0, 1.0)] * (max(each) // 2 - len(own)) for own in turned]
        both = torch.tensor(pairs, dtype=torch.float32, device=device)
        return cls(both[..., 0].contiguous(), both[..., 1].contiguous(), dtype)
