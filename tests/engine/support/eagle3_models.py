"""Random EAGLE-3 checkpoints for tiny models, and what plain torch and transformers' modules compute with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.support.oracle import oracle_model

LAYER: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
READ = (0, 1, 2)
"""Numbers of layers of the tiny models, which have three, after which states are read."""
DRAFTED = [*range(3, 101, 4), *range(20, 27)]
"""The model's ids of the tokens that can be drafted."""


def save_eagle3(
    directory: Path,
    model: Path,
    *,
    drafted: Sequence[int] | None = tuple(sorted(set(DRAFTED))),
    has_embedding: bool = False,
    norms_residual: bool = False,
    norms_states: bool = False,
    norms_each: bool = False,
    norms_output: bool = False,
    nested: bool = False,
    **changes: Any,
) -> Path:
    """Save a random layer for a model. drafted: None for all tokens, without a map; nested: as speculators do."""
    config = oracle_model(model).config
    vocab, hidden = config.vocab_size, config.hidden_size
    layer = {**LAYER, "vocab_size": vocab, **changes}
    ours, bias, own = layer["hidden_size"], layer.get("attention_bias", False), torch.Generator().manual_seed(3)
    heads, kv_heads = (layer[key] * layer["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    count = vocab if drafted is None else len(drafted)
    at = "layers.0" if nested else "midlayer"
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.self_attn.q_proj.weight": (heads, 2 * ours),
        f"{at}.self_attn.k_proj.weight": (kv_heads, 2 * ours),
        f"{at}.self_attn.v_proj.weight": (kv_heads, 2 * ours),
        f"{at}.self_attn.o_proj.weight": (ours, heads),
        f"{at}.mlp.gate_proj.weight": (layer["intermediate_size"], ours),
        f"{at}.mlp.up_proj.weight": (layer["intermediate_size"], ours),
        f"{at}.mlp.down_proj.weight": (ours, layer["intermediate_size"]),
        "fc.weight": (ours, len(READ) * hidden),
        "lm_head.weight": (count, ours),
    }
    if bias:
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "o": ours}
        shapes |= {f"{at}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if has_embedding:
        shapes["embed_tokens.weight"] = (vocab, ours)
    weights = {name: 0.2 * torch.randn(shape, generator=own) for name, shape in shapes.items()}
    norms = (f"{at}.input_layernorm", f"{at}.hidden_norm", f"{at}.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.rand(ours, generator=own) + 0.5 for name in norms}
    if norms_states:
        weights["input_norm.weight"] = torch.rand(len(READ) * hidden, generator=own) + 0.5
    for index in READ if norms_each else ():
        weights[f"fc_norm.{index}.weight"] = torch.rand(hidden, generator=own) + 0.5
    if drafted is not None:
        weights["d2t"] = torch.tensor(drafted) - torch.arange(count)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, torch.tensor(drafted), True)
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    outer = {"draft_vocab_size": count, "target_hidden_size": hidden}
    if nested:
        outer |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "norm_before_residual": norms_residual,
            "norm_before_fc": norms_states,
            "eagle_aux_hidden_state_layer_ids": list(READ),
            "transformer_layer_config": layer,
        }
    else:
        outer |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READ), "use_aux_hidden_state": True},
            "norm_before_residual": norms_residual,
            **layer,
        }
    outer |= {name: True for name, has in (("fc_norm", norms_each), ("norm_output", norms_output)) if has}
    (directory / "config.json").write_text(json.dumps(outer))
    return directory


class Reference:
    """The layer of a checkpoint in plain torch, with attention, MLP and rotation of transformers' Llama."""

    def __init__(self, directory: Path, model: Path) -> None:
        # Imports Triton, which tests of its kernels tell to interpret before that.
        from transformers.models.llama import modeling_llama as llama

        self._model = oracle_model(model)
        raw = json.loads((directory / "config.json").read_text())
        nested = raw.get("transformer_layer_config")
        given, keys = nested or raw, (*LAYER, "attention_bias", "vocab_size")
        config = llama.LlamaConfig(**{key: given[key] for key in keys if key in given})
        config._attn_implementation = "eager"
        self._norms_residual = raw["norm_before_residual"]
        weights = load_file(directory / "model.safetensors")
        at = "layers.0." if nested else "midlayer."
        part = {name.removeprefix(at): each for name, each in weights.items() if name.startswith(at)}
        self._attention, self._mlp = llama.LlamaAttention(config, 0), llama.LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(self._attention, name)
            wide = torch.nn.Linear(2 * config.hidden_size, plain.out_features, bias=plain.bias is not None)
            setattr(self._attention, name, wide)
        self._rotary = llama.LlamaRotaryEmbedding(config)
        self._norms = {
            name: llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        }
        for module, prefix in ((self._attention, "self_attn."), (self._mlp, "mlp.")):
            module.load_state_dict({n.removeprefix(prefix): w for n, w in part.items() if n.startswith(prefix)})
        for name, norm in self._norms.items():
            norm.weight.data = weights["norm.weight"] if name == "norm" else part[f"{name}.weight"]
        self._fc, self._head, self._states_norm = weights["fc.weight"], weights["lm_head.weight"], None
        if "input_norm.weight" in weights:
            self._states_norm = llama.LlamaRMSNorm(self._fc.shape[1], config.rms_norm_eps)
            self._states_norm.weight.data = weights["input_norm.weight"]
        self._fc_norms = [weights[f"fc_norm.{index}.weight"] for index in READ if raw.get("fc_norm")]
        self._norms_output, self._eps = raw.get("norm_output", False), config.rms_norm_eps
        self._table = weights.get("embed_tokens.weight")
        offsets = weights.get("d2t")
        self._ids = torch.arange(len(self._head)) + (0 if offsets is None else offsets)

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The reduced states of all tokens, [1, N, hidden_size]."""
        found = self._model.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        each = [found[index] for index in READ]
        if self._fc_norms:
            scales = [torch.rsqrt(state.square().mean(-1, keepdim=True) + self._eps) for state in each]
            each = [state * scale * norm for state, scale, norm in zip(each, scales, self._fc_norms, strict=True)]
        read = torch.cat(each, -1)
        reduced: torch.Tensor = (read if self._states_norm is None else self._states_norm(read)) @ self._fc.T
        return reduced

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits after the last of `tokens`, for all of the model's, and the layer's state, [1, 1, hidden]."""
        ids = torch.tensor([list(tokens)])
        embedded = (self._model.model.embed_tokens.weight if self._table is None else self._table)[ids]
        normed = self._norms["hidden_norm"](before)
        x = normed if self._norms_residual else before
        both = torch.cat((self._norms["input_layernorm"](embedded), normed), -1)
        length = len(tokens)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        turned = self._rotary(both, torch.arange(length)[None])
        x = x + self._attention(hidden_states=both, position_embeddings=turned, attention_mask=mask)[0]
        x = (x + self._mlp(self._norms["post_attention_layernorm"](x)))[:, -1:]
        logits, normed = torch.full((self._model.config.vocab_size,), -torch.inf), self._norms["norm"](x)
        logits[self._ids] = (normed @ self._head.T)[0, -1]
        return logits, normed if self._norms_output else x

    @torch.inference_mode()
    def drafts(
        self, tokens: Sequence[int], count: int, start: int = 1, bias: Mapping[int, float] | None = None
    ) -> list[int]:
        """The `count` likeliest tokens, each after those before it, that the layer predicts after `tokens`. Its
        context begins at position `start`; `bias` is added to the logits of some tokens.
        """
        before, known = self.states(tokens)[:, start - 1 : -1], list(tokens)
        for _ in range(count):
            logits, own = self.logits(known[start:], before)
            for token, added_to in (bias or {}).items():
                logits[token] += added_to
            known.append(int(logits.argmax()))
            before = torch.cat((before, own), 1)
        return known[len(tokens) :]


@cache
def reference(directory: Path, model: Path) -> Reference:
    """The layer of a checkpoint, made once."""
    return Reference(directory, model)
