"""Which layers are mixtures of experts, and their shape. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The shape of sparsely used MLPs (Shazeer et al. 2017, arXiv:1701.06538)."""

    num_experts: int
    """Number of experts in each sparse layer."""
    per_token: int
    """Number of experts that each token is routed to."""
    intermediate_size: int
    """Inner size of one expert."""
    renormalizes: bool
    """Whether the weights of a token's experts are scaled to a sum of one."""
    layers: frozenset[int]
    """The sparse layers; the others have one dense MLP."""
    held: range
    """The experts whose weights this rank holds: all of them, unless ranks share them."""

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], renormalizes: bool) -> ExpertsConfig | None:
        """Read the experts of a config.json; None when no layer has any. Raises ModelLoadError, KeyError.

        `renormalizes` is the family's default.
        """
        # transformers 5 saves the number under Mixtral's name for both families.
        named = "num_local_experts" if "num_local_experts" in raw else "num_experts"
        num_experts, step = int(raw[named]), int(raw.get("decoder_sparse_step", 1))
        if step < 1:
            raise ModelLoadError(
                f"decoder_sparse_step is {step}, expected at least 1 (every how-many-th layer is sparse)"
            )
        dense = frozenset(raw.get("mlp_only_layers") or ())
        sparse = frozenset(range(step - 1, int(raw["num_hidden_layers"]), step)) - dense
        if num_experts == 0 or not sparse:
            return None
        per_token = int(raw["num_experts_per_tok"])
        if not 1 <= per_token <= num_experts:
            raise ModelLoadError(f"num_experts_per_tok is {per_token}, expected 1 to {num_experts} ({named})")
        inner = int(raw.get("moe_intermediate_size", raw["intermediate_size"]))
        is_renormalized = bool(raw.get("norm_topk_prob", renormalizes))
        return cls(num_experts, per_token, inner, is_renormalized, sparse, range(num_experts))

    def expected_experts(self, num_tokens: float) -> float:
        """Return the mean number of a layer's experts that so many tokens use, if choices are equally likely."""
        is_idle: float = (1 - self.per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - is_idle)
