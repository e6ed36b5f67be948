"""A model's configuration, read from its config.json. Nothing here imports torch or runs a model's own code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from engine.models.errors import ModelLoadError
from engine.models.experts_config import ExpertsConfig
from engine.models.families import family_of, layer_windows
from engine.models.formats import Fp8Format, WeightFormat, weight_format
from engine.models.rope import RopeConfig

WeightType = Literal["float32", "bfloat16", "float16"]
ELEMENT_BYTES: Mapping[WeightType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model: its shape, and which variations of the common decoder it uses."""

    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; equal to `num_heads` (MHA), a divisor (GQA) or 1 (MQA)."""
    head_dim: int
    max_position_embeddings: int
    """The longest context the model supports, in tokens."""
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    """For each layer, how many last positions a query attends to, its own included; None for all."""
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether every query and key head gets an RMS norm before rotation (Qwen3)."""
    tied_embeddings: bool
    """Whether the output projection is the embedding table."""
    eos_token_ids: frozenset[int]
    """Tokens that end a text; generation_config.json takes precedence over config.json."""
    dtype: WeightType
    """Type of the checkpoint's weights, or of its unquantized weights if others are quantized."""
    weight_format: WeightFormat | None = None
    """How the layers' matrices are quantized; None for plain numbers."""
    experts: ExpertsConfig | None = None
    """The layers whose MLP is a mixture of experts; None when none is."""

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read config.json and generation_config.json. Raises ModelLoadError."""
        generation = _read_json(directory / "generation_config.json", optional=True)
        return cls.from_file(directory / "config.json", generation)

    @classmethod
    def from_file(cls, path: Path, generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read one config.json at any path. Raises ModelLoadError."""
        return cls.from_json(_read_json(path), generation or {}, str(path))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], generation: Mapping[str, Any], name: str) -> ModelConfig:
        """Read the contents of a config.json; errors call it `name`. Raises ModelLoadError."""
        try:
            return cls._from_raw(raw, generation)
        except KeyError as missing:
            raise ModelLoadError(f"{name} lacks the key {missing}; download the model again") from None
        except ModelLoadError:
            raise
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ModelLoadError(f"{name} holds a value of the wrong type: {error}") from error

    @classmethod
    def _from_raw(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        architecture, family = family_of(raw)
        _refuse_unsupported(raw)
        stored = weight_format(raw)
        if stored is not None and family.has_experts:
            raise ModelLoadError(
                f"quantized experts are not supported: use an unquantized version of this {architecture}"
            )
        num_heads, num_layers = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
        num_kv_heads = raw.get("num_key_value_heads", family.num_kv_heads) or num_heads
        if num_heads % num_kv_heads:
            raise ModelLoadError(f"{num_heads} query heads cannot share {num_kv_heads} key-value heads evenly")
        attention_bias = bool(raw.get("attention_bias", False)) if family.qkv_bias is None else False
        limit = int(raw["max_position_embeddings"])
        rope = RopeConfig.from_config(raw, limit)
        windows = layer_windows(family, raw, num_layers)
        if len(windows) != num_layers:
            raise ModelLoadError(f"layer_types lists {len(windows)} layers, num_hidden_layers says {num_layers}")
        return cls(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            num_layers=num_layers,
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=raw.get("head_dim") or family.head_dim or raw["hidden_size"] // num_heads,
            max_position_embeddings=max(limit, rope.stretched_context),
            rope=rope,
            layer_windows=windows,
            norm_eps=float(raw.get("rms_norm_eps", family.eps)),
            qkv_bias=family.qkv_bias if family.qkv_bias is not None else attention_bias,
            output_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
            dtype=_weight_type(raw.get("dtype", raw.get("torch_dtype"))),
            experts=ExpertsConfig.from_config(raw, family.renormalizes) if family.has_experts else None,
            weight_format=stored,
        )

    def experts_in(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of a sparse layer, None for a dense one."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def num_parameters(self) -> int:
        """Number of weights in the model; tied ones count once."""
        return round(self._parameters(0 if self.experts is None else self.experts.num_experts))

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token uses: of the experts, only those it is routed to."""
        return round(self._parameters(0 if self.experts is None else self.experts.per_token))

    def parameters_read(self, num_tokens: float) -> float:
        """Average number of weights that a step of so many tokens reads: without experts that no token uses."""
        return self._parameters(0 if self.experts is None else self.experts.expected_experts(num_tokens))

    def _parameters(self, experts_each: float) -> float:
        """Number of weights when `experts_each` experts of each sparse layer are counted."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        query = self.num_heads * self.head_dim
        attention = (qkv + query) * self.hidden_size + qkv * self.qkv_bias + self.hidden_size * self.output_bias
        layer = attention + 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        dense = 3 * self.hidden_size * self.intermediate_size
        dense += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        total = self.num_layers * (layer + dense) + tables + self.hidden_size
        if self.experts is None:
            return total
        router = self.experts.num_experts * self.hidden_size
        sparse = router + experts_each * 3 * self.hidden_size * self.experts.intermediate_size
        return total + len(self.experts.layers) * (sparse - dense)

    def weight_bytes(self, element_bytes: int, quantization: str | None = None) -> int:
        """Return the bytes of all weights in memory, at `element_bytes` per plain number.

        `quantization` is the engine's setting: "fp8" rounds the layers' matrices, "int8" also the output head,
        which it copies when that is the embedding table.
        """
        matrices = self._matrices()
        stored = Fp8Format() if quantization in ("fp8", "int8") else self.weight_format
        if stored is None:
            return self.num_parameters * element_bytes
        if quantization == "int8":
            matrices.append((self.vocab_size, self.hidden_size))
        plain = self.num_parameters - sum(outputs * inputs for outputs, inputs in matrices)
        if quantization == "int8" and self.tied_embeddings:
            plain += self.vocab_size * self.hidden_size
        return plain * element_bytes + sum(stored.matrix_bytes(*shape) for shape in matrices)

    def _matrices(self) -> list[tuple[int, int]]:
        """List (outputs, inputs) of the layers' matrices, except experts, which are never quantized."""
        query, hidden, inner = self.num_heads * self.head_dim, self.hidden_size, self.intermediate_size
        qkv = query + 2 * self.num_kv_heads * self.head_dim
        num_dense = self.num_layers - (0 if self.experts is None else len(self.experts.layers))
        return self.num_layers * [(qkv, hidden), (hidden, query)] + num_dense * [
            (2 * inner, hidden),
            (hidden, inner),
        ]

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers, at `element_bytes` per number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def _read_json(path: Path, *, optional: bool = False) -> Mapping[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"no {path.name} in {path.parent}: expected the directory of a Hugging Face-style model "
            "(config.json, *.safetensors, tokenizer.json)"
        ) from None
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}; download the model again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return cast("Mapping[str, Any]", value)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"unsupported activation {activation!r}; supported is silu")


def _eos_token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _weight_type(value: str | None) -> WeightType:
    name = (value or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelLoadError(f"unsupported weight type {name!r}; supported are float32, bfloat16 and float16")
    return cast(WeightType, name)
