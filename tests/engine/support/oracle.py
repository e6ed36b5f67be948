"""The tests' oracle: tiny random models of every family, and what `transformers` computes with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
import transformers

from engine.values.beam_search import BeamParams, Hypothesis

P = ParamSpec("P")
T = TypeVar("T")
Tiny = Callable[[str], Path]
"""The directory of a family's tiny model."""
VOCAB = 101
BEAM_EOS = [5, 17, 23, 42, 66, 71, 88, 90]
"""Enough ends of text that some beams end and others go on."""
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_QWEN3_MOE = {
    "head_dim": 64,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "sliding_window": 9,
}

_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_LONG_ROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1 + pair / 8 for pair in range(8)],
    "long_factor": [2 + pair for pair in range(8)],
    "original_max_position_embeddings": 512,
}
_MINISTRAL3_ROPE = {**_YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
_GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK_V3 = {
    **_GLM4_MOE,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": {**_YARN_ROPE, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9},
}
_DEEPSEEK_V3_DIRECT = {
    **_DEEPSEEK_V3,
    "q_lora_rank": None,
    "head_dim": 32,
    "qk_rope_head_dim": 32,  # The latent key has 64 numbers, which native attention computes, unlike 48.
    "v_head_dim": 24,
    "rope_interleave": False,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 0.5,
    "attention_bias": True,
    "mlp_bias": True,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "moe_layers": [1, 3],
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "rope_parameters": _LLAMA3_ROPE,
}
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "initializer_range": 0.05,  # with larger weights, transformers in float32 is farther from float64 than 1e-4
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_NATIVE_STEPS = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
"""Sizes of a delta net whose decodes the native kernel computes."""
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
_GEMMA4 = {
    "num_hidden_layers": 5,
    "global_head_dim": 64,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
    "initializer_range": 0.05,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
}
_LISTED_LAYERS = ["full_attention", "linear_attention", "linear_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3.1": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 11}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": _YARN_ROPE}),
    "qwen2_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3_tied": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_sliding": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 11}),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_plain": ("Qwen3Moe", {**_QWEN3_MOE, "attention_bias": True, "norm_topk_prob": False}),
    "qwen3_moe_mixed": ("Qwen3Moe", {**_QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3_moe_listed": ("Qwen3Moe", {**_QWEN3_MOE, "mlp_only_layers": [1], "use_sliding_window": True}),
}
"""Family name to transformers' class prefix and what differs from the common tiny shape.

`mistral`'s window (11) and `llama3.1`'s original context (64) are shorter than the tests' sequences.
"""

MORE_FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "phi3": ("Phi3", {"pad_token_id": 0, "rope_parameters": _PARTIAL_ROPE}),
    "phi3_long": (
        "Phi3",
        {"pad_token_id": 0, "head_dim": 16, "rope_parameters": _LONG_ROPE},
    ),
    "granite": ("Granite", _GRANITE),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 4, "rope_scaling": _YARN_ROPE}),
    "glm4_moe": ("Glm4Moe", {**_GLM4_MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_groups": ("Glm4Moe", {**_GLM4_MOE, "n_group": 4, "topk_group": 2}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 16}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK_V3),
    "deepseek_v3_direct": ("DeepseekV3", _DEEPSEEK_V3_DIRECT),
    "qwen3_next": ("Qwen3Next", {**_HYBRID, **_SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5Text", {**_HYBRID, **_NATIVE_STEPS, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**_HYBRID, **_SHARED_EXPERT, "layer_types": _LISTED_LAYERS}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "seed_oss": ("SeedOss", {"attention_out_bias": True}),
    "ministral": ("Ministral", {"sliding_window": 9}),
    "ministral3": ("Ministral3", {"rope_parameters": _MINISTRAL3_ROPE}),
    "llama4": ("Llama4Text", _LLAMA4),
    "llama4_without_norms": ("Llama4Text", {**_LLAMA4, "use_qk_norm": False, "moe_layers": None}),
    "gemma2": ("Gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 20, "num_hidden_layers": 2}),
    "gemma4": ("Gemma4Text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_small": (
        "Gemma4Text",
        {**_GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4_moe": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
            "attention_k_eq_v": True,
        },
    ),
    "gemma3": ("Gemma3Text", {"sliding_window": 9, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3}),
}
"""Families that one test per family compares (`tests/engine/models/test_families.py`); add new ones here."""


def save_tiny(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A tiny random float32 model of `family` (FAMILIES, MORE_FAMILIES), saved in `directory`, which is returned.

    Deterministic in its arguments. `overrides` are config fields: `eos_token_id=7`, `num_hidden_layers=1`.
    """
    prefix, differences = (FAMILIES | MORE_FAMILIES)[family]
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **differences, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at zero and norms at one: a test must see them
                torch.nn.init.normal_(parameter, std=0.3)
            elif "sinks" in name or name.endswith("proj_bias"):
                torch.nn.init.normal_(parameter)
            elif "norm" in name or name.endswith("scale"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            if prefix == "Gemma4Text" and ("q_norm" in name or "k_norm" in name):
                # Its norms make scores small, which nothing else does.
                parameter.data *= len(parameter) ** -0.25
        for name, buffer in model.named_buffers():
            if "correction" in name:
                torch.nn.init.normal_(buffer, std=0.3)
            elif name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def tiny_models(directories: pytest.TempPathFactory, shape: Callable[[str], Mapping[str, int]]) -> Tiny:
    """Returns a function that saves a tiny model of a family on its first call, with `shape` of the family."""
    return cache(lambda family: save_tiny(family, directories.mktemp(family.replace(".", "_")), **shape(family)))


def oracle_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in `directory` as transformers runs it, with its plainest attention: the same one in each call."""
    return _oracle_model(directory, dtype)


@lru_cache(maxsize=32)
def _oracle_model(directory: Path, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    )
    return model.eval()


@torch.inference_mode()
def oracle_logits(directory: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size]: the logits after every token, computed in one pass, in `dtype`."""
    logits: torch.Tensor = oracle_model(directory, dtype)(torch.tensor([list(token_ids)])).logits[0]
    return logits.float()


def _once(compute: Callable[P, Sequence[T]]) -> Callable[P, list[T]]:
    """Have a function compute each result once: the models on disk do not change."""
    known: dict[str, Sequence[T]] = {}

    @wraps(compute)
    def look_up(*args: P.args, **options: P.kwargs) -> list[T]:
        key = repr((args, options))
        if key not in known:
            known[key] = compute(*args, **options)
        return list(known[key])

    return look_up


@_once
@torch.inference_mode()
def oracle_greedy(directory: Path, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The `n` tokens that greedy decoding appends to the prompt; ends of text are not heeded."""
    tokens = list(prompt_ids)
    cache = None
    model = oracle_model(directory)
    given = torch.tensor([tokens])
    for _ in range(n):
        out = model(given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        given = torch.tensor([tokens[-1:]])
    return tokens[len(prompt_ids) :]


@_once
@torch.inference_mode()
def oracle_beams(
    directory: Path, prompt_ids: Sequence[int], params: BeamParams, n: int, eos: Sequence[int] = (), **options: Any
) -> list[Hypothesis]:
    """Hypotheses of transformers' beam search within `n` tokens, best first. `options` are those of `generate`."""
    prompt = torch.tensor([list(prompt_ids)])
    found = oracle_model(directory).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # else a prompt's token 0 would be taken for padding
        do_sample=False,
        num_beams=params.width,
        num_return_sequences=params.num_returned,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=n,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    outputs = found.sequences[:, len(prompt_ids) :].tolist()
    if params.width == 1:  # that is greedy decoding for transformers, which reports no score of the whole
        steps = zip(found.scores, outputs[0], strict=True)
        total = sum(float(torch.log_softmax(logits[0], -1)[token]) for logits, token in steps)
        scores = [total / len(outputs[0]) ** params.length_penalty]
    else:
        scores = found.sequences_scores.tolist()
    found = [tuple(_up_to(output, eos)) for output in outputs]
    return [
        Hypothesis(output, score, "stop" if output[-1] in eos else "length")
        for output, score in zip(found, scores, strict=True)
    ]


def _up_to(tokens: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    stops = [position for position, token in enumerate(tokens) if token in ends]
    return tokens[: stops[0] + 1] if stops else tokens


def random_ids(seed: int, length: int) -> list[int]:
    """A prompt of that many tokens."""
    return random.Random(seed).choices(range(VOCAB), k=length)


def assert_same_hypotheses(ours: Sequence[Hypothesis], theirs: Sequence[Hypothesis]) -> None:
    """Assert the same tokens and ends in the same order, with scores that differ by rounding alone."""
    assert [(h.token_ids, h.finish_reason) for h in ours] == [(h.token_ids, h.finish_reason) for h in theirs]
    assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], rel=1e-4, abs=1e-4)
