"""Knows which models CUDA graphs cannot compute on any GPU. Imports no torch."""

from __future__ import annotations

from engine.model_config.config import ModelConfig


def why_not_model(model: ModelConfig) -> str | None:
    """Return why no graph can replay a model's decode steps; None if one can."""
    if model.norms.scales_layers:
        return "its layers differ in their heads, and torch computes their additional parts"
    return None


def why_no_prompts(model: ModelConfig) -> str | None:
    """Return why no graph can replay steps with prompts or draft tokens; None if one can."""
    if model.delta_net is not None:
        return "its gated delta nets compute prompts and draft tokens row by row"
    return why_not_model(model)
