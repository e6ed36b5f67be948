"""The shape of mixtures of experts, and the layers that have them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import agreed


@dataclass(frozen=True, slots=True)
class Clamp:
    """gpt-oss' SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and |up| <= limit."""

    alpha: float
    limit: float


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
    is_sigmoid: bool = False
    """Whether an expert's score is a separate sigmoid (DeepSeek-V3, arXiv:2412.19437), not a share."""
    has_correction: bool = False
    """Whether experts are chosen by score plus a correction, which is not part of their weights."""
    num_groups: int = 1
    groups_per_token: int = 1
    """A token's experts are chosen from this many groups of experts, by the sum of each group's two best
    scores."""
    scales_inputs: bool = False
    """Whether an expert's weight multiplies its input (Llama 4), not its output."""
    scaling: float = 1.0
    """Factor of the experts' weights."""
    shared_size: int = 0
    """Inner size of the MLP that every token goes through in addition to its experts; 0 if there is none."""
    shared_is_gated: bool = False
    """Whether that MLP's output is multiplied by the sigmoid of a separate gate (Qwen2-MoE)."""
    router_bias: bool = False
    clamp: Clamp | None = None
    """The clamped activation of experts with biases (gpt-oss); None: SiLU, without biases."""
    are_next_to_mlp: bool = False
    """Whether they are next to a layer's MLP, with separate norms and gates by GELU (Gemma 4)."""
    are_quantized: bool = False
    """Whether memory holds their matrices quantized, like the files (`engine/model_parts/formats.py`)."""
    is_mxfp4: bool = False
    """Whether files hold experts in MXFP4 (`engine/layers/mxfp4_linear.py`). Memory holds them so too, if they
    `are_quantized`."""

    @classmethod
    def from_config(
        cls,
        raw: Mapping[str, Any],
        layers: Collection[int] | None = None,
        *,
        renormalizes: bool = True,
        counted: Sequence[str] = ("num_local_experts", "num_experts"),
        used: str = "num_experts_per_tok",
        size: str = "intermediate_size",
    ) -> ExpertsConfig | None:
        """Read the experts of a config.json; None if no layer has any. Raises ModelLoadError, KeyError.

        `layers`: the sparse layers, None for all. `counted`, `used`, `size`: the family's keys for the number of
        experts, the experts per token, and an expert's inner size.
        """
        count = int(raw["num_hidden_layers"])
        num_experts = int(agreed(raw, *counted))
        sparse = frozenset(range(count) if layers is None else layers)
        if num_experts == 0 or not sparse:
            return None
        per_token = int(agreed(raw, used, "experts_per_token"))
        if not 1 <= per_token <= num_experts:
            raise ModelLoadError(f"{used} is {per_token}, expected 1 to {num_experts} ({counted[0]})")
        return cls(num_experts, per_token, int(raw[size]), renormalizes, sparse, range(num_experts))

    @classmethod
    def from_sigmoid(
        cls,
        raw: Mapping[str, Any],
        *,
        counted: Sequence[str] = ("n_routed_experts", "num_local_experts"),
        size: str,
    ) -> ExpertsConfig | None:
        """Read experts that are chosen by sigmoids, from DeepSeek-V3's keys. Raises ModelLoadError, KeyError."""
        layers = int(raw["num_hidden_layers"])
        first = min(int(raw.get("first_k_dense_replace") or 0), layers)
        found = cls.from_config(
            raw,
            range(first, layers),
            renormalizes=bool(raw.get("norm_topk_prob", True)),
            counted=counted,
            size=size,
        )
        groups, open_groups = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
        if found is None:
            return None
        if found.num_experts % groups or not 1 <= open_groups <= groups:
            raise ModelLoadError(
                f"n_group is {groups} and topk_group {open_groups}, expected groups that divide "
                f"{found.num_experts} experts evenly, and a part of them"
            )
        if found.per_token > (chosen := found.num_experts // groups * open_groups):
            raise ModelLoadError(
                f"num_experts_per_tok is {found.per_token}, but topk_group leaves {chosen} experts to choose from"
            )
        return replace(
            found,
            is_sigmoid=True,
            has_correction=True,
            num_groups=groups,
            groups_per_token=open_groups,
            scaling=float(raw.get("routed_scaling_factor", 1.0)),
            shared_size=found.intermediate_size * int(raw.get("n_shared_experts") or 0),
        )

    @property
    def can_be_rounded(self) -> bool:
        """Whether plain experts can be rounded to eight bits when they are loaded: no kernel supports rounded ones
        with biases, or next to an MLP.
        """
        return self.clamp is None and not (self.are_next_to_mlp or self.is_mxfp4)

    def widened(self) -> ExpertsConfig:
        """Return the experts as memory without MXFP4 holds them."""
        return replace(self, are_quantized=False) if self.is_mxfp4 else self

    def num_parameters(self, hidden_size: int, experts_each: float) -> float:
        """Return the number of weights of a sparse layer, counting `experts_each` of its experts."""
        expert = 3 * hidden_size * self.intermediate_size
        if self.clamp is not None:
            expert += 2 * self.intermediate_size + hidden_size
        router = self.num_experts * (hidden_size + self.router_bias)
        shared = 3 * hidden_size * self.shared_size + hidden_size * self.shared_is_gated
        if self.are_next_to_mlp:  # Three norms, and scales of the router's inputs and of each expert.
            router += 4 * hidden_size + self.num_experts
        return router + experts_each * expert + shared

    def expected_experts(self, num_tokens: float) -> float:
        """Return the mean number of a layer's experts that so many tokens use, if choices are equally likely."""
        is_idle: float = (1 - self.per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - is_idle)
