"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), and the ways in which models stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.base.errors import ModelLoadError
from engine.model_parts.config_keys import layered

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The mapping from positions to angles. Fields after `factor` belong to the types named in their comments."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    """Factor by which the context is stretched."""
    original_max_position: int = 0  # llama3, yarn, longrope: the context before it was stretched, in tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0
    """Factor of cosines and sines (the temperature of yarn and longrope; 1 for other types)."""

    rotary_dim: int | None = None
    """Number of a head's numbers that are rotated (partial rotary); None for all."""
    share: float = 1.0  # proportional: the rotated part of a head's pairs, the fastest ones
    is_interleaved: bool = False
    """Whether the two numbers of a rotated pair are adjacent in files; then all of a head are rotated."""
    short_factors: tuple[float, ...] = ()  # longrope: divisors of frequencies in contexts up to the original one
    long_factors: tuple[float, ...] = ()  # longrope: divisors in longer ones
    context: int = 0
    """longrope: the longest served context, in tokens. All prompts are rotated alike, because they share KV."""

    @classmethod
    def from_config(
        cls,
        raw: Mapping[str, Any],
        head_dim: int,
        theta: float = 10000.0,
        *,
        is_partial: bool = False,
        original: int | None = None,
    ) -> RopeConfig:
        """Read one rotation from a config.json: its settings, and the keys next to them for what these lack.

        `theta` is the family's default; `is_partial`: whether the family may rotate only a part of each head;
        `original`: the context before it was stretched, in families that state it elsewhere. Raises
        ModelLoadError.
        """
        keys = ("rope_theta", "partial_rotary_factor") if is_partial else ("rope_theta",)
        beside = {key: raw[key] for key in keys if raw.get(key) is not None}
        settings = layered(rope_settings(raw), beside, {"rope_theta": theta})
        if original is not None:
            key = "original_max_position_embeddings"
            if settings.get(key, original) != original:
                raise ModelLoadError(
                    f"{key} is {original}, but {settings[key]} next to the rope type; expected the same"
                )
            settings = layered({key: original}, settings)
        return cls.from_parameters(settings, head_dim, int(raw["max_position_embeddings"]), is_partial=is_partial)

    @classmethod
    def from_parameters(
        cls,
        scaling: Mapping[str, Any],
        head_dim: int,
        max_position_embeddings: int,
        *,
        is_partial: bool = False,
    ) -> RopeConfig:
        """Read one rotation; `is_partial` as in `from_config`. Raises ModelLoadError."""
        rope_type = _rope_type(scaling)
        rope_type = "longrope" if rope_type == "su" else rope_type  # its name in the first Phi-3
        if rope_type not in ROPE_TYPES:
            raise ModelLoadError(f"unsupported rope type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}")
        theta, share = float(scaling["rope_theta"]), float(scaling.get("partial_rotary_factor", 1.0))
        if rope_type == "proportional" and 0 < share <= 1:
            return cls(theta, rope_type, float(scaling.get("factor") or 1.0), share=share)
        rotary_dim = int(head_dim * share)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ModelLoadError(
                f"partial_rotary_factor rotates {rotary_dim} of a head's {head_dim} numbers; expected an even part"
            )
        part = None if rotary_dim == head_dim else rotary_dim
        if part is not None and not is_partial:
            raise ModelLoadError(
                f"partial_rotary_factor is {share}, but this family rotates whole heads: set 1, or leave it out"
            )
        if rope_type == "default":
            return cls(theta, rotary_dim=part)
        original = int(scaling.get("original_max_position_embeddings") or max_position_embeddings)
        factor = scaling.get("factor")
        if factor is None and rope_type not in ("yarn", "longrope"):
            raise ModelLoadError(f"rope type {rope_type!r} needs a factor in rope_scaling")
        factor = float(factor if factor is not None else max_position_embeddings / original)
        short, long = (tuple(map(float, scaling.get(f"{kind}_factor", ()))) for kind in ("short", "long"))
        if rope_type == "longrope" and not len(short) == len(long) == rotary_dim // 2:
            raise ModelLoadError(
                f"rope type 'longrope' has {len(short)} short and {len(long)} long factors, expected "
                f"{rotary_dim // 2} of each: one for each rotated pair of numbers"
            )
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
            attention_factor=_attention_factor(rope_type, scaling, factor, original),
            rotary_dim=part,
            short_factors=short,
            long_factors=long,
            context=max_position_embeddings if rope_type == "longrope" else 0,
        )

    def for_context(self, num_tokens: int) -> RopeConfig:
        """Return the rotation for contexts of at most so many tokens."""
        return replace(self, context=num_tokens) if self.rope_type == "longrope" else self

    def order(self, head_dim: int) -> list[int] | None:
        """Return the order of a head's numbers in which each is rotated with the one head_dim / 2 after it; None
        if the file has this order. Scores do not depend on the order, if queries and keys have the same.

            file    [ a a' | b b' | rest ]      a turns with b, a' with b'
            here    [ a a' rest | b b' rest ]   the rest is rotated by angles of zero
        """
        if self.is_interleaved:
            return [*range(0, head_dim, 2), *range(1, head_dim, 2)]
        if self.rotary_dim is None:
            return None
        turned, rest = self.rotary_dim // 2, (head_dim - self.rotary_dim) // 2
        kept = range(self.rotary_dim, head_dim)
        return [*range(turned), *kept[:rest], *range(turned, 2 * turned), *kept[rest:]]

    @property
    def stretched_context(self) -> int:
        """Context that yarn makes usable, in tokens; 0 for other types, whose config already includes it."""
        return int(self.original_max_position * self.factor) if self.rope_type == "yarn" else 0

    def pairs(self, head_dim: int) -> list[tuple[float, float]]:
        """Return the angle per position of each of the head_dim / 2 pairs, and its factor of cosine and sine."""
        turned = [(frequency, self.attention_factor) for frequency in self.inverse_frequencies(head_dim)]
        return turned + [(0.0, 1.0)] * (head_dim // 2 - len(turned))

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Return the angle per position, in radians, of each rotated pair."""
        dim = self.rotary_dim or head_dim
        plain = [self.theta ** -(2 * pair / dim) for pair in range(dim // 2)]
        if self.rope_type == "proportional":  # Gemma 4: frequencies of whole heads; the slow ones are not used
            return [frequency / self.factor for frequency in plain[: int(self.share * head_dim // 2)]]
        if self.rope_type == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.rope_type == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        if self.rope_type == "yarn":
            return self._yarn(plain, dim)
        if self.rope_type == "longrope":  # Ding et al. 2024, arXiv:2402.13753
            factors = self.long_factors if self.context > self.original_max_position else self.short_factors
            return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)]
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
            """Return the pair that makes `turns` rotations over the original context."""
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


def rope_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_scaling`, which model cards tell people to add, or else `rope_parameters`, as transformers 5
    saves it. Raises ModelLoadError if the former would lose the latter's theta.
    """
    added: Mapping[str, Any] = raw.get("rope_scaling") or {}
    saved: Mapping[str, Any] = raw.get("rope_parameters") or {}
    if not added:
        return saved
    if saved.get("rope_theta") is not None and added.get("rope_theta") is None and raw.get("rope_theta") is None:
        raise ModelLoadError(
            f"rope_scaling replaces rope_parameters, but lacks their rope_theta {saved['rope_theta']}: add it to "
            "rope_scaling"
        )
    return added


def _rope_type(settings: Mapping[str, Any]) -> str:
    """Return the type from its current or former key."""
    named, once = settings.get("rope_type"), settings.get("type")
    return str(named or once or "default")


def stretched_scale(raw: Mapping[str, Any]) -> float:
    """Return the factor of scores if yarn has `mscale_all_dim` (DeepSeek): the square of its temperature."""
    scaling = rope_settings(raw)
    rope_type, weight = _rope_type(scaling), scaling.get("mscale_all_dim")
    if rope_type == "default" or not weight:
        return 1.0
    return _temperature(float(scaling["factor"]), float(weight)) ** 2


def _temperature(factor: float, weight: float = 1.0) -> float:
    """Return yarn's temperature of a context that is stretched by `factor` (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention_factor(rope_type: str, scaling: Mapping[str, Any], factor: float, original: int) -> float:
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if rope_type == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor)
