"""Tiny embedding models as they are published: a decoder without an output head, and how its states are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.support.oracle import oracle_model, save_tiny

LAST_TOKEN = {"word_embedding_dimension": 96, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def save_headless(directory: Path, family: str = "qwen3", **overrides: Any) -> Path:
    """A decoder saved by itself, whose tensors are not below "model."; the whole model is in `whole/`."""
    whole = save_tiny(family, directory / "whole", **overrides)
    oracle_model(whole).model.save_pretrained(directory / "alone")
    return directory / "alone"


def describe(directory: Path, pooling: dict[str, Any] | None = None, *more: str) -> Path:
    """Add what sentence-transformers writes beside a model; `more` are further modules."""
    kinds = ["Transformer", "Pooling", *more]
    modules = [
        {"idx": index, "path": f"{index}_{kind}" if index else "", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(LAST_TOKEN if pooling is None else pooling))
    return directory
