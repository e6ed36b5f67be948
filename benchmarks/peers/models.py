"""The models that are compared: real shapes with random weights, made here and the same for everybody.

Weights are drawn so that activations keep their size from layer to layer and layers outweigh embeddings: what
comes out is no language, but differs from token to token as language does. The tokenizer is byte-level BPE as
Llama 3's and Qwen's are: all bytes, then words of lower-case letters, so that every engine can read it and any id
is text.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_COMMON = {
    "bos_token_id": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",  # its name before transformers 5
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "qwen3-moe-0.5b": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "router_aux_loss_coef": 0.001,
    },
    "gemma3-0.5b": _COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "layer_types": ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(18)],
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "gpt-oss-0.7b": _COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
        "hidden_size": 768,
        "intermediate_size": 768,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["full_attention" if number % 2 else "sliding_attention" for number in range(12)],
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "llama-15m": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 832,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "mlp_bias": False,
    },
}
"""By name, as their config.json; 596, 542, 486, 670 and 14.9 million parameters."""
FIRST_WORD = 256
"""Ids below are single bytes; the last id is the end of text. Those between may stand in a prompt."""
END = "<|endoftext|>"


_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def make_model(name: str, root: Path, seed: int = 0) -> Path:
    """The directory of model `name` under `root`, written on the first call."""
    directory = root / f"{name}-{seed}"
    if directory.is_dir():
        return directory
    config = CONFIGS[name] | {"eos_token_id": CONFIGS[name]["vocab_size"] - 1}
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(draw_weights(config, seed), unfinished / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(config["vocab_size"]).save(str(unfinished / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    known["chat_template"] = _CHAT
    for file, content in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"], "do_sample": False},
        "tokenizer_config.json": known | {"model_max_length": config["max_position_embeddings"]},
        "special_tokens_map.json": {"eos_token": END},
    }.items():
        (unfinished / file).write_text(json.dumps(content, indent=2) + "\n")
    return unfinished.rename(directory)


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """All tensors of a checkpoint by name: [out, in] for matrices, [experts, in, out] for stacked ones, the
    embeddings [vocabulary, hidden].
    """
    hidden = config["hidden_size"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    layer: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norms}
    layer |= _attention_shapes(config) | _mlp_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return shapes | {"model.norm.weight": (hidden,)}


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    inputs = {name: queries if name == "o_proj" else hidden for name in outputs}
    found: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}.weight": (width, inputs[name]) for name, width in outputs.items()
    }
    if config["model_type"] == "gpt_oss":
        found |= {f"self_attn.{name}.bias": (width,) for name, width in outputs.items()}
        return found | {"self_attn.sinks": (config["num_attention_heads"],)}
    if config["model_type"] != "llama":
        found |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return found


def _mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "gpt_oss":
        count = config["num_local_experts"]
        return {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    mlps, found = ["mlp"], dict[str, tuple[int, ...]]()
    if "num_experts" in config:
        found["mlp.gate.weight"] = config["num_experts"], hidden
        mlps, inner = (
            [f"mlp.experts.{number}" for number in range(config["num_experts"])],
            config["moe_intermediate_size"],
        )
    for mlp in mlps:
        found |= {f"{mlp}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        found[f"{mlp}.down_proj.weight"] = hidden, inner
    return found


def draw_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Norms of ones, matrices of variance 1 / inputs, small embeddings, biases and sinks; bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    norm = 0 if config["model_type"] == "gemma3_text" else 1  # Gemma adds one to what files hold
    for name, shape in weight_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.full(shape, norm, dtype=torch.bfloat16)
        else:
            spread = 0.02 if name.endswith(("bias", "sinks")) or "embed" in name else shape[1] ** -0.5
            weights[name] = (torch.randn(shape, generator=generator) * spread).bfloat16()
    return weights


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Bytes, words of two to four letters (a leading blank counts as one), and `END` as the last id."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), vocab_size - 1 - len(pieces)))
    pieces += [first + second for first, second in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def words(count: int, first: int = 0) -> str:
    """Text of `count` words that are one token each, from the `first`-th on; there are 676, which go round."""
    letters = string.ascii_lowercase
    pairs = (divmod((first + number) % len(letters) ** 2, len(letters)) for number in range(count))
    return "".join(f" {letters[one]}{letters[other]}" for one, other in pairs)


def _merges() -> Iterator[tuple[str, str]]:
    """Ever longer words, each a shorter one and a letter; "Ġ" is how byte-level BPE writes a blank."""
    words = ["Ġ", *string.ascii_lowercase]
    while True:
        found = list(itertools.product(words, string.ascii_lowercase))
        yield from found
        words = [first + second for first, second in found]


def matrix_parameters(config: dict[str, Any]) -> int:
    """Parameters that every token is multiplied with, the output layer among them (here the embeddings)."""
    experts = config.get("num_experts") or config.get("num_local_experts")
    share = config["num_experts_per_tok"] / experts if experts else 1
    shapes = {
        name: shape for name, shape in weight_shapes(config).items() if len(shape) > 1 and "bias" not in name
    }
    if not config["tie_word_embeddings"]:
        del shapes["model.embed_tokens.weight"]
    return round(sum(math.prod(shape) * (share if ".experts." in name else 1) for name, shape in shapes.items()))


def all_parameters(config: dict[str, Any]) -> int:
    """Parameters in memory."""
    return sum(map(math.prod, weight_shapes(config).values()))


def kv_numbers(config: dict[str, Any]) -> int:
    """How many numbers a token's keys and values are, in all layers."""
    return 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def prefill_flops(config: dict[str, Any], prompts: list[int]) -> float:
    """Floating-point operations to compute prompts of these lengths, of which only the last tokens need logits."""
    output: int = config["vocab_size"] * config["hidden_size"]
    matrices = matrix_parameters(config) - output
    heads: int = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    # A score and its share of the values: 4 per head dimension and pair, of which half lie in the past.
    return sum(2.0 * (matrices * length + output + heads * length * length) for length in prompts)
