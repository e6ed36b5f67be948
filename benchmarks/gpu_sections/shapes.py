"""The models that are measured, as their config.json: the shapes are true, the weights will be random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151_936,
    "torch_dtype": "bfloat16",
}
MODELS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen3-0.6b": _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "llama-3.1-8b": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "vocab_size": 128_256,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        "qwen3-14b": _QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "tie_word_embeddings": False,
        },
    }
)
MIXTURES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen3-30b-a3b": _QWEN3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        }
    }
)
"""Mixtures of experts."""
SMALL: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "check": MODELS["qwen3-0.6b"] | {"num_hidden_layers": 4, "vocab_size": 16_384},
        "tiny": MODELS["qwen3-0.6b"]
        | {
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 10_240,
            "max_position_embeddings": 4096,
        },
        "check mixture": MIXTURES["qwen3-30b-a3b"] | {"num_hidden_layers": 2, "vocab_size": 16_384},
        "tiny mixture": MIXTURES["qwen3-30b-a3b"]
        | {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "vocab_size": 10_240,
            "max_position_embeddings": 4096,
        },
    }
)
"""For correctness; and for a machine without a GPU."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a model makes the device read and compute, in numbers (not bytes) and operations."""

    matrices: int
    """Weights of all layers' matrices, but for experts."""
    head: int
    """Weights of the output projection, which a prompt needs once and a decode for each token."""
    table: int
    """Weights of an embedding table that is no output projection: memory, but hardly read."""
    attention_width: int
    """Query heads times their size, over all layers."""
    kv_per_token: int
    """Keys and values of a token, over all layers."""
    experts: int = 0
    """Weights of all experts, over all layers."""
    used: float = 0.0
    """The share of them that a token is multiplied with."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Size:
        """Compute the size from a config.json."""
        layers, hidden, head_dim = raw["num_hidden_layers"], raw["hidden_size"], raw["head_dim"]
        queries, keys = raw["num_attention_heads"] * head_dim, raw["num_key_value_heads"] * head_dim
        num_experts = raw.get("num_experts", 0)
        inner = 0 if num_experts else raw["intermediate_size"]
        layer = hidden * (2 * queries + 2 * keys + 3 * inner)
        table = raw["vocab_size"] * hidden
        size = cls(
            layers * layer, table, 0 if raw["tie_word_embeddings"] else table, layers * queries, 2 * layers * keys
        )
        if not num_experts:
            return size
        experts = 3 * layers * num_experts * hidden * raw["moe_intermediate_size"]
        return replace(size, experts=experts, used=raw["num_experts_per_tok"] / num_experts)

    @property
    def weights(self) -> int:
        """Number of all weights."""
        return self.matrices + self.experts + self.head + self.table

    @property
    def multiplied(self) -> float:
        """Number of the layers' weights that a token is multiplied with."""
        return self.matrices + self.experts * self.used

    def read(self, tokens: float) -> float:
        """Number of the layers' weights that a step of so many tokens reads, if they choose experts at random."""
        unread: float = (1.0 - self.used) ** tokens
        return self.matrices + self.experts * (1 - unread)
