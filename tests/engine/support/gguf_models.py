"""Writes tiny models as llama.cpp's converter would, with ggml's own package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize

from engine.gguf.types import TYPES

Kinds = Mapping[str, gguf.GGMLQuantizationType]
_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "granite": "granite",
}  # fmt: skip
"""What GGUF calls models of these types."""
SCALES_AT: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the float16 numbers are in a block."""


def random_blocks(kind: gguf.GGMLQuantizationType, *shape: int, seed: int = 0, size: float = 0.1) -> np.ndarray:
    """Return random uint8 [*shape, bytes of a row] of numbers [*shape]; scales are `size` on average."""
    ours, generator = TYPES[int(kind)], np.random.default_rng(seed)
    blocks = *shape[:-1], shape[-1] // ours.block
    raw = generator.integers(0, 256, (*blocks, ours.block_bytes), dtype=np.uint8)
    for place in SCALES_AT[ours.name]:
        scales = generator.normal(0, size, blocks).astype(np.float16)
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def write_gguf(
    directory: Path,
    path: Path,
    kinds: Kinds | None = None,
    keys: Mapping[str, Any] | None = None,
    *,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write the model in `directory` to a GGUF file, whose path is returned.

    `kinds`: types of tensors by parts of their names in the file ("ffn_down"), F32 for the others; types that the
    package cannot make get random numbers. `keys`: more keys of the architecture; `drop`: those to leave out.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_keys(config), **(keys or {})}.items():
        if key not in drop and value is not None:
            _add(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, config.vocab_size)
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        _add_tensor(writer, theirs, _converted(name, tensor, config, architecture), kinds or {})
    for name, factors in _rope_tensors(config).items():
        writer.add_tensor(name, np.asarray(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Add a vocabulary of so many tokens, of which the last ends a text."""
    tokens = ["a", "b", "ab", *(f"token{number}" for number in range(3, vocab - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, "<|im_end|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * (vocab - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab - 1)


def _keys(config: Any) -> dict[str, Any]:
    """Return the keys of the architecture, as the converter writes them."""
    rope, kind = config.rope_parameters, config.model_type
    single = rope if "rope_type" in rope else rope["full_attention"]
    dim, scaling = config.head_dim, single["rope_type"]
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(single["rope_theta"]),
        "rope.dimension_count": int(dim * single.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
    }
    if scaling in ("linear", "yarn"):
        keys |= {"rope.scaling.type": scaling, "rope.scaling.factor": float(single["factor"])}
        if scaling == "yarn":
            keys["rope.scaling.original_context_length"] = single["original_max_position_embeddings"]
    if kind == "phi3":
        original = config.original_max_position_embeddings
        keys |= {"rope.scaling.original_context_length": original, "attention.sliding_window": 0}
        if scaling == "longrope":
            factor = config.max_position_embeddings / original
            temperature = np.sqrt(1 + np.log(factor) / np.log(original)) if factor > 1 else 1.0
            keys["rope.scaling.attn_factor"] = float(temperature)
    if kind in ("gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window
    if kind == "gemma2":
        keys["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if kind == "granite":
        keys |= {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    return keys


def _converted(name: str, tensor: torch.Tensor, config: Any, architecture: str) -> np.ndarray:
    numbers = tensor.float().numpy()
    if architecture in ("llama", "granite") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = numbers.reshape(heads, 2, len(numbers) // heads // 2, *numbers.shape[1:])
        return halves.swapaxes(1, 2).reshape(numbers.shape)
    return numbers + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else numbers


def _add_tensor(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kinds: Kinds) -> None:
    kind = next((kind for part, kind in kinds.items() if part in name), gguf.GGMLQuantizationType.F32)
    if kind == gguf.GGMLQuantizationType.F32 or numbers.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(numbers, np.float32))
        return
    try:
        raw = quantize(np.ascontiguousarray(numbers, np.float32), kind)
    except NotImplementedError:
        raw = random_blocks(kind, *numbers.shape, seed=len(name), size=1e-3)
    writer.add_tensor(name, raw, raw_dtype=kind)


def _rope_tensors(config: Any) -> dict[str, Any]:
    """Return the factors of frequencies that the converter makes of some kinds of rope."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        return {"rope_freqs.weight": plain / scaled}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{each}.weight": rope[f"{each}_factor"] for each in ("long", "short")}
    return {}
