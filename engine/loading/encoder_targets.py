"""The targets of an encoder's tensors: name, shape, and rows of the fused parameters."""

from __future__ import annotations

from collections.abc import Container, Iterator

from engine.loading.target_parts import WeightTarget, fused, whole
from engine.model_config.encoder import EncoderConfig

LEFT_OUT = ("pooler.", "embeddings.position_ids")
"""Tensors that embeddings and scores do not need: next-sentence prediction's pooler, and a range."""
_PREFIXES = ("", "roberta.", "model.")
"""Prefixes of the encoder's names, if it was saved by itself or with a head."""

Targets = Iterator[tuple[str, WeightTarget]]


def encoder_prefix(present: Container[str]) -> str:
    """Return the prefix of the encoder's tensors in a checkpoint with the names `present`."""
    first = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
    return next((prefix for prefix in _PREFIXES for name in first if f"{prefix}{name}" in present), "")


def encoder_targets(config: EncoderConfig, prefix: str) -> dict[str, WeightTarget]:
    """Return the target of each tensor of a checkpoint, by its name; `prefix` precedes the encoder's names."""
    targets = _modernbert(config) if config.is_modern else _xlm_roberta(config)
    found = {f"{prefix}{name}": target for name, target in targets}
    return found | (dict(_head(config)) if config.has_head else {})


def _xlm_roberta(config: EncoderConfig) -> Targets:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "embeddings.word_embeddings.weight", whole("tokens", config.vocab_size, hidden)
    yield "embeddings.position_embeddings.weight", whole("places", config.num_positions, hidden)
    yield "embeddings.token_type_embeddings.weight", whole("types", config.num_token_types, hidden)
    yield from _norm(config, "embeddings.LayerNorm", "embedded_norm")
    for layer in range(config.num_layers):
        theirs, ours = f"encoder.layer.{layer}", f"layers.{layer}"
        names = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
        every = slice(0, hidden)
        yield from fused(names, f"{ours}.attention.qkv", [(hidden, every)] * 3, hidden, bias=True)
        yield from _linear(f"{theirs}.attention.output.dense", f"{ours}.attention.output", hidden, hidden)
        yield from _norm(config, f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm")
        yield from _linear(f"{theirs}.intermediate.dense", f"{ours}.mlp.inner", inner, hidden)
        yield from _linear(f"{theirs}.output.dense", f"{ours}.mlp.output", hidden, inner)
        yield from _norm(config, f"{theirs}.output.LayerNorm", f"{ours}.mlp_norm")


def _modernbert(config: EncoderConfig) -> Targets:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.has_biases
    yield "embeddings.tok_embeddings.weight", whole("tokens", config.vocab_size, hidden)
    yield from _norm(config, "embeddings.norm", "embedded_norm")
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        if layer > 0:
            yield from _norm(config, f"{at}.attn_norm", f"{at}.attention_norm")
        yield from _linear(f"{at}.attn.Wqkv", f"{at}.attention.qkv", 3 * hidden, hidden, bias=bias)
        yield from _linear(f"{at}.attn.Wo", f"{at}.attention.output", hidden, hidden, bias=bias)
        yield from _norm(config, f"{at}.mlp_norm", f"{at}.mlp_norm")
        yield from _linear(f"{at}.mlp.Wi", f"{at}.mlp.inner", 2 * inner, hidden, bias=config.mlp_bias)
        yield from _linear(f"{at}.mlp.Wo", f"{at}.mlp.output", hidden, inner, bias=config.mlp_bias)
    yield from _norm(config, "final_norm", "last_norm")


def _head(config: EncoderConfig) -> Targets:
    """Yield the classification head, whose names have no prefix."""
    hidden = config.hidden_size
    if not config.is_modern:
        yield from _linear("classifier.dense", "head.dense", hidden, hidden)
        yield from _linear("classifier.out_proj", "head.score", 1, hidden)
        return
    yield from _linear("head.dense", "head.dense", hidden, hidden, bias=config.head_bias)
    yield from _norm(config, "head.norm", "head.norm")
    yield from _linear("classifier", "head.score", 1, hidden)


def _linear(theirs: str, ours: str, outputs: int, inputs: int, *, bias: bool = True) -> Targets:
    yield f"{theirs}.weight", whole(f"{ours}.weight", outputs, inputs)
    if bias:
        yield f"{theirs}.bias", whole(f"{ours}.bias", outputs)


def _norm(config: EncoderConfig, theirs: str, ours: str) -> Targets:
    yield f"{theirs}.weight", whole(f"{ours}.weight", config.hidden_size)
    if config.norm_bias:
        yield f"{theirs}.bias", whole(f"{ours}.bias", config.hidden_size)
