"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and the ways in which models stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.errors import ModelLoadError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. Fields after `factor` belong to the types named in their comments."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    """Factor by which the context is stretched."""
    original_max_position: int = 0  # llama3, yarn: the context before it was stretched, in tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0
    """Factor of cosines and sines (yarn's temperature; 1 for other types)."""

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it)."""
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ModelLoadError(f"unsupported rope type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}")
        if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ModelLoadError("partial_rotary_factor is not supported: models must rotate whole heads")
        theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
        if rope_type == "default":
            return cls(theta)
        original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
        original = int(original or max_position_embeddings)
        factor = scaling.get("factor")
        if factor is None and rope_type != "yarn":
            raise ModelLoadError(f"rope type {rope_type!r} needs a factor in rope_scaling")
        factor = float(factor if factor is not None else max_position_embeddings / original)
        return cls(
            theta,
            rope_type,
            factor,
            original,
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=_yarn_attention_factor(scaling, factor) if rope_type == "yarn" else 1.0,
        )

    @property
    def stretched_context(self) -> int:
        """Context that yarn makes usable, in tokens; 0 for other types, whose config already includes it."""
        return int(self.original_max_position * self.factor) if self.rope_type == "yarn" else 0

    def pairs(self, head_dim: int) -> list[tuple[float, float]]:
        """Return the angle per position of each of the head_dim / 2 pairs, and its factor of cosine and sine."""
        return [(frequency, self.attention_factor) for frequency in self.inverse_frequencies(head_dim)]

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Return the angle per position of each of the head_dim / 2 pairs, in radians."""
        plain = [self.theta ** -(2 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.rope_type == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.rope_type == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        if self.rope_type == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    def _llama3(self, frequency: float) -> float:
        """Scale as Llama 3.1: stretch long wavelengths, keep short ones, interpolate between them."""
        turns = self.original_max_position * frequency / (2 * math.pi)  # within the original context
        if turns > self.high_freq_factor:
            return frequency
        if turns < self.low_freq_factor:
            return frequency / self.factor
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        """Scale as YaRN (Peng et al. 2023, arXiv:2309.00071), by its "NTK by parts" interpolation."""

        def pair_turning(turns: float) -> float:
            """Return the pair that makes `turns` turns over the original context."""
            reach = self.original_max_position / (turns * 2 * math.pi)
            return head_dim * math.log(reach) / (2 * math.log(self.theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low or 0.001
        stretched = []
        for pair, frequency in enumerate(plain):
            ramp = min(max((pair - low) / span, 0.0), 1.0)
            stretched.append(frequency / self.factor * ramp + frequency * (1 - ramp))
        return stretched


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
