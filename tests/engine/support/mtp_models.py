"""Tiny random models with a layer for multi-token prediction, and what plain torch computes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.support.oracle import oracle_model, save_tiny

_NEXT = "model.layers.3"
NAMES: Mapping[str, tuple[str, str, str, str, str]] = {
    "deepseek_v3": (_NEXT, f"{_NEXT}.enorm", f"{_NEXT}.hnorm", f"{_NEXT}.eh_proj", f"{_NEXT}.shared_head.norm"),
    "glm4_moe": (_NEXT, f"{_NEXT}.enorm", f"{_NEXT}.hnorm", f"{_NEXT}.eh_proj", f"{_NEXT}.shared_head.norm"),
    "qwen3_next": ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen3_5_moe": ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen3_5": ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
}
"""The names of the layer, of the norms of embeddings and hidden states, of the projection and of the last norm."""


def save_with_mtp(family: str, directory: Path, **overrides: Any) -> Path:
    """Save a tiny model whose MTP layer is the last layer of another one, which is saved next to it."""
    save_tiny(family, directory, **overrides)
    save_tiny(family, _other(directory), seed=9, **overrides)
    weights = load_file(directory / "model.safetensors")
    other = load_file(_other(directory) / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in other if name.startswith("model.layers."))
    layer, *norms, projection, norm = NAMES[family]
    ours = {
        f"{layer}.{name.removeprefix(f'model.layers.{last}.')}": tensor
        for name, tensor in other.items()
        if name.startswith(f"model.layers.{last}.")
    }
    hidden = len(weights["model.norm.weight"])
    random = torch.Generator().manual_seed(5)
    for name in (*norms, norm):
        ours[f"{name}.weight"] = torch.rand(hidden, generator=random) + 0.5
    ours[f"{projection}.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=random)
    save_file({**weights, **ours}, directory / "model.safetensors", {"format": "pt"})
    return directory


@torch.inference_mode()
def reference_drafts(
    family: str,
    directory: Path,
    tokens: Sequence[int],
    count: int,
    start: int = 1,
    bias: Mapping[int, float] | None = None,
) -> list[int]:
    """The `count` likeliest tokens, each after those before it, that the MTP layer predicts after `tokens`. Its
    context begins at position `start`; `bias` is added to the logits of some tokens.
    """
    model, weights = oracle_model(directory), load_file(directory / "model.safetensors")
    layer = oracle_model(_other(directory)).model.layers[-1]
    _, *norms, projection, norm = (weights.get(f"{name}.weight") for name in NAMES[family])
    eps, added = model.config.rms_norm_eps, 1.0 if family.startswith("qwen3_") else 0.0

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + added)

    before = model.model(torch.tensor([list(tokens)])).last_hidden_state[:, start - 1 : -1]
    known = list(tokens)
    for _ in range(count):
        embedded = model.model.embed_tokens(torch.tensor([known[start:]]))
        both = torch.cat((normed(embedded, norms[0]), normed(before, norms[1])), -1)
        x, length = both @ projection.T, len(known) - start
        positions = torch.arange(length)[None]
        out = layer(
            x,
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(x, positions),
        )
        last = normed((out[0] if isinstance(out, tuple) else out)[:, -1:], norm)
        before = torch.cat((before, last), 1)
        logits = model.lm_head(last)[0, -1]
        for token, added_to in (bias or {}).items():
            logits[token] += added_to
        known.append(int(logits.argmax()))
    return known[len(tokens) :]


def _other(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-other")
