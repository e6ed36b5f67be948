"""Knows which models CUDA graphs cannot compute on any GPU. Imports no torch."""

from __future__ import annotations

from engine.model_config.config import ModelConfig


def why_not_model(model: ModelConfig) -> str | None:
    """Return why no graph can replay a model's decode steps; None if one can."""
    if model.norms.scales_layers and model.experts is not None:
        return "torch computes its experts, and the host must know how many tokens each of them has"
    return None


def why_no_drafts(model: ModelConfig) -> str | None:
    """Return why no graph can replay steps with draft tokens or prompts; None if one can."""
    if len(model.kinds_of_heads) > 1:
        return "its layers differ in their heads"
    return why_not_model(model)
